"""What the built-in policies for preemption decide, case by case."""

from __future__ import annotations

import pytest

from vsched.policy import Preemption, PreemptionView, RunningView
from vsched_policies.preemption import Cheapest, Youngest


def running(*tokens: int, blocks: int = 1) -> PreemptionView:
    """Return a view of requests with so many computed tokens each, oldest first."""
    requests = [
        RunningView(tokens=size, blocks=blocks, outputs=size, priority=0, arrived_ns=index)
        for index, size in enumerate(tokens)
    ]
    return PreemptionView(now_ns=9, running=requests)


def test_youngest_takes_the_last() -> None:
    assert Youngest().victim(running(5, 1, 9)) == Preemption(2)
    assert Youngest(manner="swap").victim(running(5, 1, 9)) == Preemption(2, "swap")


@pytest.mark.parametrize(
    ("tokens", "victim"),
    [((5, 1, 9), 1), ((5,), 0), ((3, 1, 7, 1), 3), ((4, 4, 4), 2), ((0, 2), 0)],
)
def test_cheapest_takes_the_fewest_tokens_of_several_the_youngest(
    tokens: tuple[int, ...], victim: int
) -> None:
    assert Cheapest().victim(running(*tokens)) == Preemption(victim)
    swapping = Cheapest(manner="swap")
    assert swapping.victim(running(*tokens)) == Preemption(victim, "swap")
