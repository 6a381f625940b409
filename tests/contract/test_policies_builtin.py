"""What the built-in policies for memory, routing and preemption decide, case by case."""

from __future__ import annotations

import msgspec
import pytest

from vsched.policy import (
    Build,
    Fail,
    MemoryView,
    PreemptionView,
    ReplicaView,
    RoutingView,
    RunningView,
)
from vsched_policies.memory import Pinned
from vsched_policies.preemption import Youngest
from vsched_policies.routing import RoundRobin


def memory_view(**changes: int) -> MemoryView:
    view = MemoryView(
        device="cpu",
        total_bytes=10_000,
        available_bytes=7_000,
        weights_bytes=2_000,
        bytes_per_token=10,
        tokens_min=100,
    )
    return msgspec.structs.replace(view, **changes)


def test_pinned_builds_the_given_size() -> None:
    assert Pinned(tokens=100).plan(memory_view()) == Build(100)
    assert Pinned(bytes=1_009).plan(memory_view()) == Build(100)


@pytest.mark.parametrize(("fraction", "tokens_max"), [(1.0, 700), (0.5, 350), (0.95, 665)])
def test_pinned_fits_the_fraction_of_what_is_left(fraction: float, tokens_max: int) -> None:
    """C5: mem_fraction multiplies the budget: 10,000 bytes less 2,000 of weights and 1,000 of others."""
    assert Pinned(tokens=tokens_max, mem_fraction=fraction).plan(memory_view()) == Build(tokens_max)
    refused = Pinned(tokens=tokens_max + 1, mem_fraction=fraction).plan(memory_view())
    assert isinstance(refused, Fail)
    assert f"value {tokens_max + 1} tokens x 10 bytes" in refused.message
    assert f"limit {tokens_max * 10} bytes ({tokens_max} tokens)" in refused.message
    assert f"Remedy: lower generate.memory.tokens to {tokens_max} or less" in refused.message


def test_pinned_refuses_less_than_one_request() -> None:
    """C5's wording rule: value, limit, remedy."""
    refused = Pinned(tokens=99).plan(memory_view())
    assert isinstance(refused, Fail)
    assert "value 99 tokens, limit at least 100 tokens." in refused.message
    assert "Remedy: raise generate.memory.tokens to 100 or more" in refused.message


def test_pinned_needs_the_size_once() -> None:
    with pytest.raises(ValueError, match="value neither of tokens and bytes"):
        Pinned()
    with pytest.raises(ValueError, match="value both of tokens and bytes"):
        Pinned(tokens=1, bytes=1)


def test_round_robin_takes_the_healthy_in_turn() -> None:
    def choose(healthy: list[bool]) -> list[int]:
        replicas = [
            ReplicaView(index=index, load_tokens=0, healthy=well)
            for index, well in enumerate(healthy)
        ]
        return [
            RoundRobin().choose(
                RoutingView(replicas=replicas, prompt_tokens=1, item_keys=[], routed=routed)
            )
            for routed in range(4)
        ]

    assert choose([True, True, True]) == [0, 1, 2, 0]
    assert choose([True, False, True]) == [0, 2, 0, 2]
    assert choose([False, False]) == [0, 1, 0, 1]


def test_youngest_takes_the_last() -> None:
    running = [
        RunningView(tokens=1, blocks=1, outputs=0, priority=0, arrived_ns=index)
        for index in range(3)
    ]
    assert Youngest().victim(PreemptionView(now_ns=9, running=running)) == 2
