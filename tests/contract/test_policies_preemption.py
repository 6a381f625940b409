"""Decisions of the built-in preemption policies, case by case."""

from __future__ import annotations

import pytest

from vsched.policy import Preemption, PreemptionView, RunningView
from vsched.policy.measured import Measurements, StepTime, SwapTime
from vsched_policies.preemption import Cheapest, SwapLong, Youngest
from vsched_policies.requests import ServedTokens, TenantFair


def running(*tokens: int, blocks: int = 1) -> PreemptionView:
    """A view of requests with these numbers of computed tokens, oldest first."""
    requests = [
        RunningView(tokens=size, blocks=blocks, outputs=size, priority=0, arrived_ns=index)
        for index, size in enumerate(tokens)
    ]
    return PreemptionView(now_ns=9, running=requests)


def test_youngest_takes_the_last() -> None:
    assert Youngest().victim(running(5, 1, 9)) == Preemption(2)
    assert Youngest(mode="swap").victim(running(5, 1, 9)) == Preemption(2, "swap")


@pytest.mark.parametrize(
    ("tokens", "victim"),
    [((5, 1, 9), 1), ((5,), 0), ((3, 1, 7, 1), 3), ((4, 4, 4), 2), ((0, 2), 0)],
)
def test_cheapest_takes_the_fewest_tokens_of_several_the_youngest(
    tokens: tuple[int, ...], victim: int
) -> None:
    assert Cheapest().victim(running(*tokens)) == Preemption(victim)
    swapping = Cheapest(mode="swap")
    assert swapping.victim(running(*tokens)) == Preemption(victim, "swap")


def test_victims_are_eligible() -> None:
    """The first request needs no block, so it is older than the one in need, and goes on."""
    requests = [
        RunningView(
            tokens=size, blocks=1, outputs=99 - size, priority=0, arrived_ns=0, tenant=tenant
        )
        for size, tenant in ((1, "a"), (5, "b"), (9, "a"), (9, "b"))
    ]
    view = PreemptionView(
        now_ns=9, running=requests, in_need=1, state=ServedTokens(tokens={"a": 50})
    )
    assert Cheapest().victim(view) == Preemption(1)
    assert TenantFair().victim(view) == Preemption(2)
    assert TenantFair(mode="swap").victim(view).mode == "swap"


def long_view(
    tokens: int, *, shared: int = 0, free: int = 1000, measured: Measurements | None = None
) -> PreemptionView:
    """A view of an old request, and of a young one with this number of tokens in blocks of 16."""
    young = RunningView(
        tokens=tokens,
        blocks=-(-tokens // 16),
        outputs=1,
        priority=0,
        arrived_ns=1,
        blocks_shared=shared,
    )
    old = RunningView(tokens=9000, blocks=563, outputs=1, priority=0, arrived_ns=0)
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
