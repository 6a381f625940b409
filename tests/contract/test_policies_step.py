"""Step policies: the requests that advance in a step, their tokens, and the time of the step."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from vsched.policy import PrefillView, RequestPolicy, StepShares, StepView
from vsched.policy.measured import FirstTokenTime, Measurements, StepTime
from vsched.testing import check_policy
from vsched_policies.step import FairPrefill, InOrder, ShortestPrefill, SloFeedback
from vsched_policies.step.fair_prefill import Deficits
from vsched_policies.step.slo_feedback import PrefillTime

MS = 1_000_000
BUILT_IN = [InOrder(), ShortestPrefill(), FairPrefill(), SloFeedback(itl_target_ms=1)]


def request(tokens: int, tenant: str = "", **fields: Any) -> PrefillView:
    known = {"computed": 0, "priority": 0, "arrived_ns": 0, "joined_ns": 0}
    return PrefillView(tokens=tokens, tenant=tenant, **{**known, **fields})


def view(*prefilling: PrefillView, **fields: Any) -> StepView:
    known = {"now_ns": 10**9, "waiting": 0, "decodes": 4, "tokens_free": 1000, "time_ns": 20 * MS}
    return StepView(prefilling=prefilling, **{**known, **fields})


@pytest.mark.slow
@pytest.mark.parametrize("policy", BUILT_IN, ids=lambda policy: type(policy).__name__)
def test_step_policy_keeps_its_contract(policy: RequestPolicy) -> None:
    check_policy(policy, seeds=range(8))


@pytest.mark.parametrize("policy", BUILT_IN, ids=lambda policy: type(policy).__name__)
def test_step_answer_is_one_that_the_kernel_takes(policy: RequestPolicy) -> None:
    rng = random.Random(1)
    for _ in range(200):
        count = rng.randrange(8)
        requested = view(
            *(
                request(
                    rng.randint(1, 900),
                    rng.choice(["", "a", "b"]),
                    arrived_ns=rng.randrange(10**9),
                    computed=rng.choice([0, 5000]),
                )
                for _ in range(count)
            ),
            tokens_free=rng.choice([1, 64, 2000]),
            time_ns=rng.choice([None, 1, MS]),
            token_ns=rng.choice([0.0, 1000.0]),
        )
        if policy.state_type is not None:
            requested = msgspec.structs.replace(requested, state=policy.state_type())
        answer = policy.share(requested)
        assert sorted(set(answer.order)) == sorted(answer.order)
        assert all(0 <= index < count for index in answer.order)
        assert answer.order or not count, "at least one request advances"
        assert answer.tokens is None or len(answer.tokens) == len(answer.order)
        assert answer.time_ns is None or answer.time_ns > 0


def test_in_order_is_in_order() -> None:
    assert InOrder().share(view(request(9), request(1))) == StepShares(range(2))


def test_shortest_prefill_passes_a_long_one_until_that_is_old() -> None:
    young, old = request(900, arrived_ns=10**9), request(900, arrived_ns=0)
    short = request(10, arrived_ns=10**9)
    assert list(ShortestPrefill().share(view(young, short)).order) == [1, 0]
    assert list(ShortestPrefill(ageing_s=1.0).share(view(old, short)).order) == [0, 1]


def test_fair_prefill_shares_a_step_between_tenants() -> None:
    long, other = request(5000, "long"), request(300, "other")
    policy = FairPrefill(quantum_tokens=100)
    answer = policy.share(view(long, long, other, state=Deficits()))
    assert dict(zip(answer.order, answer.tokens or (), strict=True)) == {0: 700, 2: 300}
    assert policy.share(view(long, other, tokens_free=200, state=Deficits())).tokens == [100, 100]


def test_fair_prefill_goes_on_with_whose_turn_it_is() -> None:
    policy, state = FairPrefill(quantum_tokens=100), Deficits()
    requested = view(request(500, "a"), request(500, "b"), tokens_free=100, state=state)
    assert [list(policy.share(requested).order) for _ in range(4)] == [[0], [1], [0], [1]]


def test_fair_prefill_shares_the_time_as_well() -> None:
    """The step has space for 1,000 tokens and time for 200: no request takes all of that."""
    requested = view(
        request(900, "a"), request(900, "b"), time_ns=MS, token_ns=5000.0, state=Deficits()
    )
    assert FairPrefill(quantum_tokens=100).share(requested).tokens == [100, 100]


def test_fair_prefill_shares_between_sessions_where_it_is_told_to() -> None:
    """Requests of one conversation share a turn; by tenant, all of a tenant's requests would."""
    talk = [request(900, "a", session="talk"), request(900, "a", session="talk")]
    requested = view(*talk, request(900, "a", session="other"), state=Deficits())
    answer = FairPrefill(by="session", quantum_tokens=250).share(requested)
    given = dict(zip(answer.order, answer.tokens or (), strict=True))
    assert (given[0] + given.get(1, 0), given[2]) == (500, 500)
    alike = FairPrefill(quantum_tokens=250).share(view(*requested.prefilling, state=Deficits()))
    assert next(iter(alike.order)) == 0
    assert 2 not in alike.order


def test_fair_prefill_keeps_requests_without_a_tenant_apart() -> None:
    one, other = request(500, arrived_ns=1), request(500, arrived_ns=2)
    requested = view(one, other, tokens_free=200, state=Deficits())
    assert FairPrefill(quantum_tokens=100).share(requested).tokens == [100, 100]


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
