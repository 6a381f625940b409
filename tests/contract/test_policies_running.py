"""Decisions of the built-in preemption and step policies, case by case."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from vsched.policy import (
    Preemption,
    PreemptionView,
    PrefillView,
    RequestPolicy,
    RunningView,
    StepShares,
    StepView,
)
from vsched.policy.measured import FirstTokenTime, Measurements, StepTime, SwapTime
from vsched_policies.preemption import Cheapest, SwapLong, Youngest
from vsched_policies.requests import ServedTokens, TenantFair
from vsched_policies.step import InOrder, PrefillTime, ShortestRemaining, SloFeedback


def running(*tokens: int, blocks: int = 1) -> PreemptionView:
    """A view of requests with these numbers of computed tokens, oldest first."""
    requests = [
        RunningView(tokens=size, blocks=blocks, outputs=size, priority=0, arrived_ns=index)
        for index, size in enumerate(tokens)
    ]
    return PreemptionView(now_ns=9, running=requests)


@pytest.mark.parametrize(
    ("policy", "tokens", "victim"),
    [
        (Youngest(), (5, 1, 9), Preemption(2)),
        (Youngest(mode="swap"), (5, 1, 9), Preemption(2, "swap")),
        (Cheapest(), (5, 1, 9), Preemption(1)),
        (Cheapest(mode="swap"), (5, 1, 9), Preemption(1, "swap")),
        (Cheapest(), (5,), Preemption(0)),
        (Cheapest(), (3, 1, 7, 1), Preemption(3)),
        (Cheapest(), (4, 4, 4), Preemption(2)),
        (Cheapest(), (0, 2), Preemption(0)),
    ],
)
def test_victim_is_the_youngest_or_of_the_cheapest_the_youngest(
    policy: RequestPolicy, tokens: tuple[int, ...], victim: Preemption
) -> None:
    assert policy.victim(running(*tokens)) == victim


def test_victims_are_eligible() -> None:
    """The first request needs no block, so it is older than the one in need, and goes on."""
    requests = [
        RunningView(tokens=size, blocks=1, outputs=99 - size, arrived_ns=0, tenant=tenant)
        for size, tenant in ((1, "a"), (5, "b"), (9, "a"), (9, "b"))
    ]
    state = ServedTokens(tokens={"a": 50})
    view = PreemptionView(now_ns=9, running=requests, in_need=1, state=state)
    assert Cheapest().victim(view) == Preemption(1)
    assert TenantFair().victim(view) == Preemption(2)
    assert TenantFair(mode="swap").victim(view).mode == "swap"


def long_view(
    tokens: int, *, shared: int = 0, free: int = 1000, measured: Measurements | None = None
) -> PreemptionView:
    """A view of an old request, and of a young one with this number of tokens in blocks of 16."""
    old = RunningView(tokens=9000, blocks=563, outputs=1, priority=0, arrived_ns=0)
    sizes = {"tokens": tokens, "blocks": -(-tokens // 16), "blocks_shared": shared}
    young = msgspec.structs.replace(old, arrived_ns=1, **sizes)
    return PreemptionView(
        now_ns=9,
        running=[old, young],
        swap_blocks_free=free,
        block_tokens=16,
        measured=measured or Measurements(),
    )


def took(*, token_ns: int, block_ns: int) -> Measurements:
    """Steps with these times of a prompt token and of a block copy."""
    return Measurements(
        steps=[
            StepTime(1, busy_ns=5_000, decodes=3),
            StepTime(2, busy_ns=5_000 + 100 * token_ns, decodes=3, prefill_tokens=100),
        ],
        swaps=[SwapTime(3, 10 * block_ns, 10)],
    )


@pytest.mark.parametrize(
    ("view", "mode"),
    [
        # Nothing is measured: by the tokens that would be computed again.
        (long_view(511), "recompute"),
        (long_view(512), "swap"),
        (long_view(600, shared=10), "recompute"),
        # 640 tokens in 40 blocks, each copied twice.
        (long_view(640, measured=took(token_ns=1_000, block_ns=7_900)), "swap"),
        (long_view(640, measured=took(token_ns=1_000, block_ns=8_100)), "recompute"),
        (long_view(32, measured=took(token_ns=1_000, block_ns=7_900)), "swap"),
        # One of the two is not known.
        (long_view(64, measured=Measurements(swaps=[SwapTime(3, 1, 1)])), "recompute"),
        # The kernel would have no host memory for it.
        (long_view(640, free=39), "recompute"),
    ],
)
def test_swap_long_swaps_if_computing_takes_longer(view: PreemptionView, mode: str) -> None:
    assert SwapLong().victim(view) == Preemption(1, mode)  # type: ignore[arg-type]


MS = 1_000_000


def request(tokens: int, tenant: str = "", **fields: Any) -> PrefillView:
    known = {"computed": 0, "priority": 0, "arrived_ns": 0, "joined_ns": 0}
    return PrefillView(tokens=tokens, tenant=tenant, **{**known, **fields})


def view(*prefilling: PrefillView, **fields: Any) -> StepView:
    known = {"now_ns": 10**9, "waiting": 0, "decodes": 4, "tokens_free": 1000, "time_ns": 20 * MS}
    return StepView(prefilling=prefilling, **{**known, **fields})


def test_in_order_is_in_order() -> None:
    assert InOrder().share(view(request(9), request(1))) == StepShares(range(2))


def test_shortest_remaining_completes_short_prompts_next_to_a_share_of_the_oldest() -> None:
    """16 tokens take 16 ms."""
    policy, facts = ShortestRemaining(), {"time_ns": 100 * MS, "token_ns": 1.0 * MS}

    def shares(*tokens: int, **more: Any) -> dict[int, int]:
        answer = policy.share(view(*map(request, tokens), **{**facts, **more}))
        return dict(zip(answer.order, answer.tokens or (), strict=True))

    assert shares(500, 20, 40) == {1: 20, 2: 16, 0: 64}, "at least half of 100 ms"
    assert shares(500, 20) == {1: 20, 0: 80}, "and the rest"
    assert shares(30, 500, waiting=1) == {0: 30, 1: 32}
    assert shares(500, 400, waiting=1) == {0: 64, 1: 0}, "similar prompts one after the other"
    assert shares(500, waiting=1) == {0: 64}, "30 ms are for a request that may join"
    assert shares(500, 20, 20, time_ns=40 * MS) == {1: 20, 2: 0, 0: 16}, "a chunk at least"
    assert shares(500, 60, 90, tokens_free=90) == {1: 45, 2: 0, 0: 45}, "half of the tokens, too"
    assert policy.share(view(request(9), request(5), time_ns=None)) == StepShares([0, 1])
    alone = view(request(500), request(400), **facts, decodes=0)
    assert policy.share(alone) == StepShares([0, 1])


def test_shortest_remaining_lets_the_oldest_advance_even_if_there_is_no_time_for_a_chunk() -> None:
    facts = {"time_ns": MS, "token_ns": 1.0 * MS}
    for waiting in (0, 1):
        slow = view(request(90), request(9), **facts, waiting=waiting)
        assert ShortestRemaining().share(slow) == StepShares(range(2))
    overdue = view(request(90), request(9), request(50), **facts, overdue=(2,))
    assert ShortestRemaining().share(overdue) == StepShares([2, 0, 1])
    assert ShortestRemaining().share(view(**facts)) == StepShares(())


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
    facts = {"tokens_free": 100, "state": ServedTokens(), "measured": measured}
    requested = view(request(500, "a"), request(500, "b"), **facts)
    assert list(policy.share(requested).order) == [1]


def test_tenant_fair_shares_the_time_as_well() -> None:
    """The step has space for 1,000 tokens and time for 200: no request takes all of that."""
    facts = {"time_ns": MS, "token_ns": 5000.0, "state": ServedTokens()}
    requested = view(request(900, "a"), request(900, "b"), **facts)
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
