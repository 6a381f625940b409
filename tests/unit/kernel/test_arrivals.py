"""Arrival policies: admission, holds and repeated decisions, in records and snapshots too."""

from __future__ import annotations

import msgspec

from vsched.kernel import SchedulerLimits
from vsched.kernel.commands import RejectArrival
from vsched.kernel.events import Arrived, Withdrawn
from vsched.policy import Admit, ArrivalDecision, ArrivalView, Hold, Redirect, RequestPolicy, Shed
from vsched.testing import ModelCluster, make_request
from vsched.testing.cluster import default_policies

LIMITS = SchedulerLimits(blocks=64, slots=2, context_tokens=256, pages=16, waiting=4)
SECOND_NS = 1_000_000_000


class Told(RequestPolicy, frozen=True, kw_only=True):
    """Decides by tenant."""

    def arrive(self, view: ArrivalView) -> ArrivalDecision:
        match view.request.tenant:
            case "held" if view.request.asks < 2:
                return Hold(view.now_ns + SECOND_NS)
            case "shed":
                return Shed(f"{view.waiting} wait, {view.tenant_requests} of yours", 7, 503)
            case "elsewhere":
                return Redirect("http://other:8000/")
            case _:
                return Admit()


def cluster(policy: RequestPolicy | None = None) -> ModelCluster:
    return ModelCluster(LIMITS, default_policies(arrival=policy or Told()))


def arrive(one: ModelCluster, name: str, tenant: str = "") -> int:
    request = msgspec.structs.replace(make_request(name, [1, 2, 3]), tenant=tenant)
    return one.arrive(request)


class Urgent(RequestPolicy, frozen=True, kw_only=True):
    """Admits every request that can be served; rejections name the number of requests of the same urgency."""

    def arrive(self, view: ArrivalView) -> ArrivalDecision:
        if view.request.tenant == "asks":
            return Shed(f"{view.as_urgent} of {view.held + view.preparing + view.waiting}")
        return Admit() if view.request.tenant else Hold(view.now_ns + SECOND_NS)


def test_policy_sees_how_many_before_the_slots_are_as_urgent() -> None:
    """Running requests do not compete for a slot: here two, of priority 5 and 0."""
    one = cluster(Urgent())
    for name, tenant, priority in (
        ("runs-5", "served", 5),
        ("runs-0", "served", 0),
        ("waits-5", "served", 5),
        ("waits-0", "served", 0),
        ("held-7", "", 7),
        ("held-1", "", 1),
    ):
        request = make_request(name, [1, 2, 3], max_tokens=50)
        one.arrive(msgspec.structs.replace(request, tenant=tenant, priority=priority))
        one.run_generate()
    assert one.kernel.statistics()["running"] == 2
    reported = []
    for priority in (9, 6, 5, 1, 0):
        request = make_request(f"asks-{priority}", [1])
        one.arrive(msgspec.structs.replace(request, tenant="asks", priority=priority))
        reported.append(one.rejected[-1].reason)
    assert reported == ["0 of 4", "1 of 4", "2 of 4", "3 of 4", "4 of 4"]
    one.kernel.check_invariants()


def test_shed_and_redirected_requests_get_the_reason() -> None:
    one = cluster()
    shed, away = arrive(one, "a", "shed"), arrive(one, "b", "elsewhere")
    assert one.rejected == [
        RejectArrival(shed, "0 wait, 0 of yours", 503, 7),
        RejectArrival(away, base_url="http://other:8000/"),
    ]
    assert one.kernel.statistics()["arrival"] == {
        "admitted": 0,
        "held": 0,
        "shed": 1,
        "redirected": 1,
        "held_now": 0,
        "preparing_now": 0,
    }


def test_a_hold_ends_by_the_timer_and_another_answer() -> None:
    one = cluster()
    arrive(one, "a", "held")
    one.wait(SECOND_NS)
    assert one.kernel.statistics()["arrival"]["held_now"] == 1
    one.wait(2 * SECOND_NS)
    one.drain()
    one.check_settled()
    assert one.ended.keys() == {"a"}


def test_policy_is_not_called_for_requests_aborted_while_held() -> None:
    one = cluster()
    one.withdraw(arrive(one, "a", "held"))
    one.drain()
    one.check_settled()
    assert not one.ended
    assert one.kernel.statistics()["arrival"]["admitted"] == 0


def test_as_many_are_held_as_may_wait() -> None:
    one = cluster()
    for index in range(LIMITS.waiting + 1):
        arrive(one, f"r{index}", "held")
    (away,) = one.rejected
    assert "value 5, limit 4" in away.reason
    assert away.status == 429


def test_requests_of_a_tenant_are_counted_wherever_they_are() -> None:
    one = cluster()
    one.kernel.handle(Arrived(90, "shed-not"), 1)  # admitted, and in preparation
    for index in range(3):  # two run, one waits
        request = make_request(f"r{index}", [1, 2, 3])
        one.submit(msgspec.structs.replace(request, tenant="t"))
    assert one.kernel._table.tenants == {"t": 3}
    one.kernel.handle(Withdrawn(90), 2)
    one.kernel.check_invariants()
    one.drain()
    assert one.kernel._table.tenants == {}
