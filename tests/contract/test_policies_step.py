"""Step policies: the requests that advance in a step, their tokens, and the time of the step."""

from __future__ import annotations

from typing import Any

import msgspec

from vsched.policy import PrefillView, StepShares, StepView
from vsched.policy.measured import FirstTokenTime, Measurements, StepTime
from vsched_policies.requests import ServedTokens, TenantFair
from vsched_policies.step import InOrder, PrefillTime, SloFeedback

MS = 1_000_000


def request(tokens: int, tenant: str = "", **fields: Any) -> PrefillView:
    known = {"computed": 0, "priority": 0, "arrived_ns": 0, "joined_ns": 0}
    return PrefillView(tokens=tokens, tenant=tenant, **{**known, **fields})


def view(*prefilling: PrefillView, **fields: Any) -> StepView:
    known = {"now_ns": 10**9, "waiting": 0, "decodes": 4, "tokens_free": 1000, "time_ns": 20 * MS}
    return StepView(prefilling=prefilling, **{**known, **fields})


def test_in_order_is_in_order() -> None:
    assert InOrder().share(view(request(9), request(1))) == StepShares(range(2))


def test_tenant_fair_shares_a_step_between_tenants() -> None:
    long, other = request(5000, "long"), request(300, "other")
    policy = TenantFair(quantum_tokens=100)
    answer = policy.share(view(long, long, other, state=ServedTokens()))
    assert dict(zip(answer.order, answer.tokens or (), strict=True)) == {0: 700, 2: 300}
    few = view(long, other, tokens_free=200, state=ServedTokens())
    assert policy.share(few).tokens == [100, 100]
    served = view(long, other, tokens_free=200, state=ServedTokens(tokens={"long": 500.0}))
    assert list(policy.share(served).order) == [1]


def test_tenant_fair_goes_on_with_the_tenant_that_computed_less() -> None:
    policy = TenantFair(quantum_tokens=100)
    measured = Measurements(tokens_running={"a": 100})
    requested = view(
        request(500, "a"),
        request(500, "b"),
        tokens_free=100,
        state=ServedTokens(),
        measured=measured,
    )
    assert list(policy.share(requested).order) == [1]


def test_tenant_fair_shares_the_time_as_well() -> None:
    """The step has space for 1,000 tokens and time for 200: no request takes all of that."""
    requested = view(
        request(900, "a"), request(900, "b"), time_ns=MS, token_ns=5000.0, state=ServedTokens()
    )
    assert TenantFair(quantum_tokens=100).share(requested).tokens == [100, 100]


def gap(ended_ns: int, gap_ms: float) -> StepTime:
    return StepTime(ended_ns, gap_ns=int(gap_ms * MS), decodes=1, prefill_tokens=9)


def test_slo_feedback_moves_the_time_each_way_once_for_each_fact() -> None:
    policy = SloFeedback(itl_target_ms=50, ttft_target_ms=100, gain=0.5)
    state = PrefillTime()
    facts = Measurements(steps=[gap(1, 80)])
    for _ in range(2):
        assert policy.share(view(request(9), measured=facts, state=state)).time_ns == 10 * MS
    late = FirstTokenTime(200 * MS, ttft_ns=150 * MS, items_ns=0, queued_ns=0, prompt_tokens=9)
    facts = Measurements(steps=[gap(2, 20)], first_tokens=[late])
    for _ in range(2):
        assert policy.share(view(request(9), measured=facts, state=state)).time_ns == 15 * MS


def test_slo_feedback_puts_gaps_first_and_heeds_targets_of_requests() -> None:
    policy = SloFeedback(itl_target_ms=50, ttft_target_ms=100, gain=0.5)
    late = FirstTokenTime(200 * MS, ttft_ns=150 * MS, items_ns=0, queued_ns=0, prompt_tokens=9)
    facts = Measurements(steps=[gap(1, 80)], first_tokens=[late])
    state = PrefillTime()
    assert policy.share(view(request(9), measured=facts, state=state)).time_ns == 10 * MS
    in_time = msgspec.structs.replace(late, target_ns=300 * MS)
    facts = Measurements(first_tokens=[in_time])
    state = PrefillTime()
    assert policy.share(view(request(9), measured=facts, state=state)).time_ns == 20 * MS


def test_slo_feedback_keeps_within_its_bounds() -> None:
    policy = SloFeedback(itl_target_ms=1, gain=0.9, least_ms=2.0)
    facts = Measurements(steps=[gap(number, 80) for number in range(1, 9)])
    requested = view(request(9), measured=facts, state=PrefillTime())
    assert policy.share(requested).time_ns == 2 * MS
    assert policy.share(view(request(9), time_ns=None, state=PrefillTime())).time_ns is None
