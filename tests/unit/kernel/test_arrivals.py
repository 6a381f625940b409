"""Arrival policies: admission, holds and repeated decisions, in records and snapshots too."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.unit.kernel.setups import ByTenant, answering
from vsched.kernel import SchedulerLimits
from vsched.kernel.commands import RejectArrival
from vsched.policy import Admit, ArrivalDecision, Hold, Policy, Shed
from vsched.testing import ModelCluster, make_request
from vsched.testing.cluster import default_policies
from vsched.types import Request

LIMITS = SchedulerLimits(blocks=64, slots=2, context_tokens=256, pages=16, waiting=4)
SECOND_NS = 1_000_000_000


def cluster(policy: Policy | None = None) -> ModelCluster:
    arrival = policy or ByTenant(hold_ns=SECOND_NS, holds=2)
    return ModelCluster(LIMITS, default_policies(arrival=arrival))


def of_tenant(name: str, tenant: str, *, priority: int = 0) -> Request:
    request = make_request(name, [1, 2, 3], max_tokens=50, priority=priority)
    return msgspec.structs.replace(request, tenant=tenant)


def by_urgency(view: Any) -> ArrivalDecision:
    """Admit every request that can be served; rejections name the number of requests of the same urgency."""
    if view.request.tenant == "asks":
        return Shed(f"{view.as_urgent} of {view.held + view.preparing + view.waiting}")
    return Admit() if view.request.tenant else Hold(view.now_ns + SECOND_NS)


def test_policy_sees_how_many_before_the_slots_are_as_urgent() -> None:
    """Running requests do not compete for a slot: here two, of priority 5 and 0."""
    one = cluster(answering("arrival", by_urgency))
    for name, tenant, priority in (
        ("runs-5", "served", 5),
        ("runs-0", "served", 0),
        ("waits-5", "served", 5),
        ("waits-0", "served", 0),
        ("held-7", "", 7),
        ("held-1", "", 1),
    ):
        one.arrive(of_tenant(name, tenant, priority=priority))
        one.run_generate()
    assert one.kernel.statistics()["running"] == 2
    for priority in (9, 6, 5, 1, 0):
        one.arrive(of_tenant(f"asks-{priority}", "asks", priority=priority))
    reported = [away.reason for away in one.rejected]
    assert reported == ["0 of 4", "1 of 4", "2 of 4", "3 of 4", "4 of 4"]
    one.kernel.check_invariants()


def test_shed_and_redirected_requests_get_the_reason() -> None:
    """Requests of a tenant are counted wherever they are, also the one that runs here."""
    one = cluster()
    for index in range(3):
        one.submit(of_tenant(f"r{index}", "shed"))
    shed = one.arrive(of_tenant("a", "shed"))
    away = one.arrive(of_tenant("b", "elsewhere"))
    assert one.rejected == [
        RejectArrival(shed, "2 wait, 3 of yours", 503, 7),
        RejectArrival(away, base_url="http://other:8000/"),
    ]
    counts = one.kernel.statistics()["arrival"]
    assert {name: count for name, count in counts.items() if count} == {"shed": 1, "redirected": 1}
    one.drain()
    one.arrive(of_tenant("c", "shed"))
    assert one.rejected[-1].reason == "0 wait, 0 of yours"


def test_a_hold_ends_by_the_timer_and_another_answer() -> None:
    one = cluster()
    one.arrive(of_tenant("a", "held"))
    one.wait(SECOND_NS)
    assert one.kernel.statistics()["arrival"]["held_now"] == 1
    one.wait(2 * SECOND_NS)
    one.drain()
    one.check_settled()
    assert one.ended.keys() == {"a"}


def test_as_many_are_held_as_may_wait() -> None:
    one = cluster()
    for index in range(LIMITS.waiting + 1):
        one.arrive(of_tenant(f"r{index}", "held"))
    (away,) = one.rejected
    assert "value 5, limit 4" in away.reason
    assert away.status == 429
