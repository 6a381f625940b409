"""Decisions of the built-in arrival policies, and their effects in the kernel."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import msgspec
import pytest

from vsched.policy import Admit, ArrivalDecision, ArrivalView, ArrivingRequest, Hold, Redirect, Shed
from vsched.policy.measured import FirstTokenTime, Measurements
from vsched.testing import RequestAt, run_policy
from vsched_policies.arrival import DeadlineShed, busy_gap_ns
from vsched_policies.requests import TENANTS_MAX, ServedTokens, TenantFair

MS = 1_000_000
SECOND_NS = 1000 * MS


def ask(
    policy: TenantFair, state: ServedTokens, at_ms: int, tenant: str = "a", **view: Any
) -> ArrivalDecision:
    now_ns = at_ms * MS
    request = ArrivingRequest(tenant=tenant, arrived_ns=now_ns)
    return policy.arrive(ArrivalView(now_ns=now_ns, request=request, state=state, **view))


def test_tenant_fair_lets_a_burst_in_and_then_a_rate() -> None:
    policy, state = TenantFair(rate=10, burst=3), ServedTokens()
    assert [type(ask(policy, state, 1000)) for _ in range(5)] == [Admit, Admit, Admit, Shed, Shed]
    assert ask(policy, state, 1000, "b") == Admit()
    assert type(ask(policy, state, 1099)) is Shed
    assert type(ask(policy, state, 1100)) is Admit
    assert type(ask(policy, state, 1101)) is Shed
    assert [type(ask(policy, state, 9000)) for _ in range(4)] == [Admit, Admit, Admit, Shed]


def test_tenant_fair_holds_in_order_and_reports_when_to_come_back() -> None:
    policy, state = TenantFair(rate=1, burst=1, wait_s=2, rates={"b": 1000}), ServedTokens()
    answers = [ask(policy, state, 0) for _ in range(5)]
    assert answers[:3] == [Admit(), Hold(SECOND_NS), Hold(2 * SECOND_NS)]
    assert isinstance(ask(policy, state, 1000, hold_max_ns=SECOND_NS), Shed)
    shed = answers[3]
    assert isinstance(shed, Shed)
    assert (shed.retry_after_s, shed.status) == (1, 429)
    assert "tenant a sends too fast: value over 1 requests at once, limit 1 a second" in shed.reason
    assert ask(policy, state, 5, "b") == Admit()
    again = ArrivingRequest(tenant="a", arrived_ns=0, asks=1)
    assert policy.arrive(ArrivalView(now_ns=SECOND_NS, request=again, state=state)) == Admit()


def test_tenant_fair_remembers_few_tenants() -> None:
    policy, state = TenantFair(rate=0.001), ServedTokens()
    for index in range(TENANTS_MAX + 50):
        ask(policy, state, index, f"tenant-{index}" * 3)
    assert len(state.full_ns) == TENANTS_MAX
    assert f"tenant-{TENANTS_MAX + 49}" * 3 in state.full_ns
    assert len(msgspec.msgpack.encode(state)) < 16 << 10


def first(ended_ms: int, ttft_ms: int) -> FirstTokenTime:
    return FirstTokenTime(ended_ms * MS, ttft_ms * MS, 0, 0, prompt_tokens=1)


def late(policy: DeadlineShed, *, waiting: int, target_ms: int | None = None) -> ArrivalDecision:
    """Call the policy with first tokens every 100 ms for requests that waited, and every second if none waited."""
    firsts = [first(1000, 20), first(2000, 20), first(2100, 110), first(2200, 150)]
    now_ns = 3000 * MS
    target_ns = None if target_ms is None else now_ns + target_ms * MS
    request = ArrivingRequest(arrived_ns=now_ns, target_ns=target_ns)
    measured = Measurements(first_tokens=firsts)
    view = ArrivalView(now_ns=now_ns, request=request, waiting=waiting, measured=measured)
    return policy.arrive(view)


def test_deadline_shed_looks_at_those_ahead() -> None:
    policy = DeadlineShed(ttft_target_ms=2000, wait_share=0.5)
    assert late(policy, waiting=10) == Admit()
    shed = late(policy, waiting=31)
    assert isinstance(shed, Shed)
    assert (shed.status, shed.retry_after_s) == (503, 3)
    assert "value a wait of 3100 ms behind 31 requests, limit 1000 ms" in shed.reason
    assert late(policy, waiting=31, target_ms=6200) == Admit()
    assert late(DeadlineShed(ttft_target_ms=None), waiting=999) == Admit()
    unmeasured = ArrivalView(request=ArrivingRequest(arrived_ns=0), waiting=1000)
    assert DeadlineShed().arrive(unmeasured) == Admit()
    away = DeadlineShed(ttft_target_ms=2000, wait_share=0.5, redirect_to="http://b")
    assert late(away, waiting=31) == Redirect("http://b")


@pytest.mark.parametrize("slow_ms", [[500] * 40 + [100] * 17, [100] * 40 + [10_000] + [100] * 9])
def test_deadline_shed_forgets_a_slow_stretch_and_ignores_one_stop(slow_ms: list[int]) -> None:
    """First tokens come every 100 ms again, or always did except when the machine stood still."""
    ended_ms = accumulate(slow_ms, initial=1000)
    firsts = [first(one, 20_000) for one in ended_ms]
    assert busy_gap_ns(firsts) == 100 * MS


def test_deadline_shed_by_priority_counts_those_that_are_served_before() -> None:
    """First tokens come every 100 ms; every fifth is one of priority 0, the others are urgent."""
    policy = DeadlineShed(ttft_target_ms=1000, wait_share=1.0, by_priority=True)
    firsts = [
        FirstTokenTime(at * 100 * MS, 9000 * MS, 0, 0, prompt_tokens=1, priority=5 * (at % 5 > 0))
        for at in range(1, 41)
    ]

    def answer(priority: int, as_urgent: int, shown: list[FirstTokenTime]) -> ArrivalDecision:
        now_ns = 5000 * MS
        request = ArrivingRequest(arrived_ns=now_ns, priority=priority)
        measured = Measurements(first_tokens=shown)
        facts: dict[str, Any] = {"waiting": 99, "as_urgent": as_urgent, "measured": measured}
        return policy.arrive(ArrivalView(now_ns=now_ns, request=request, **facts))

    assert answer(5, 10, firsts) == Admit()
    assert isinstance(answer(5, 11, firsts), Shed)
    assert answer(0, 2, firsts) == Admit()
    assert isinstance(answer(0, 3, firsts), Shed), "a first token in 500 ms is left for it"
    urgent = [one for one in firsts if one.priority]
    assert isinstance(answer(0, 1, urgent), Shed), "none is left for it"
    assert answer(0, 1, []) == Admit()


def test_tenant_fair_keeps_a_rate_of_less_than_one_request_a_day() -> None:
    """Maximum of `Retry-After`: a day."""
    policy = TenantFair(rate=1 / (7 * 24 * 3600), burst=1)
    requests = [RequestAt(at_s=at, name=f"r{at}", tenant="trial") for at in range(3)]
    assert [*run_policy(policy, *requests).rejected] == ["r1", "r2"]
