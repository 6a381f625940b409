"""What each built-in policy decides, case by case."""

from __future__ import annotations

import msgspec
import pytest

from vsched.policy import (
    Admission,
    AdmissionPolicy,
    AdmissionView,
    Build,
    EncodingView,
    Fail,
    ItemSpan,
    MemoryView,
    PreemptionView,
    ReplicaView,
    RoutingView,
    RunningView,
)
from vsched_policies.admission import Fifo, TokenBudget
from vsched_policies.encoding import ChunkAware
from vsched_policies.eviction import Lru
from vsched_policies.memory import Pinned
from vsched_policies.preemption import Youngest
from vsched_policies.routing import RoundRobin


class Item(msgspec.Struct, frozen=True):
    """An item that waits for the encoder."""

    tokens: int | None
    blocks: int = 0
    priority: int = 0
    arrived_ns: int = 0


def admit(
    policy: AdmissionPolicy,
    sizes: list[int | None],
    *,
    entries_free: int = 100,
    tokens_free: int = 0,
    divisible: bool = False,
    default_tokens: int = 2048,
) -> tuple[list[int | None], list[int | None]]:
    """Return the sizes admitted and the sizes that remain, each in order."""
    view = AdmissionView(
        stage="generate" if divisible else "encode",
        now_ns=0,
        waiting=[Item(size) for size in sizes],
        tokens_free=tokens_free,
        entries_free=entries_free,
        blocks_free=0,
        running=0,
        divisible=divisible,
        default_tokens=default_tokens,
    )
    admission = policy.admit(view)
    assert admission == Admission(admission.indices), "it never holds"
    chosen = list(admission.indices)
    rest = [size for index, size in enumerate(sizes) if index not in chosen]
    return [sizes[index] for index in chosen], rest


@pytest.mark.parametrize(
    ("sizes", "admitted", "remaining"),
    [
        ([100, 99], [100, 99], []),
        ([100, 100], [100, 100], []),
        ([100, 101], [100], [101]),
        ([100, 100, 1], [100, 100], [1]),
        ([100, 101, 1], [100], [101, 1]),
    ],
)
def test_token_budget_stops_before_the_item_that_exceeds(
    sizes: list[int | None], admitted: list[int | None], remaining: list[int | None]
) -> None:
    """A1: admission stops before the item that would exceed; equal is admitted. A6: exact order."""
    assert admit(TokenBudget(max_tokens=200), sizes) == (admitted, remaining)


def test_token_budget_admits_a_first_item_above_the_budget_alone() -> None:
    """A2: no deadlock, and nothing beside it."""
    assert admit(TokenBudget(max_tokens=200), [500, 1]) == ([500], [1])
    assert admit(TokenBudget(max_tokens=200), [500]) == ([500], [])


@pytest.mark.parametrize(
    ("max_items", "entries_free", "admitted"),
    [(2, 100, 2), (100, 2, 2), (100, 100, 4), (1, 100, 1)],
)
def test_token_budget_holds_count_and_tokens(
    max_items: int, entries_free: int, admitted: int
) -> None:
    """A3: whichever of count cap and token cap binds first."""
    policy = TokenBudget(max_tokens=40, max_items=max_items)
    taken, rest = admit(policy, [10] * 6, entries_free=entries_free)
    assert (len(taken), len(rest)) == (admitted, 6 - admitted)


def test_token_budget_of_zero_is_the_count_cap_alone() -> None:
    """A4, A13: 0 opts out of the budget, not of the count cap."""
    assert admit(TokenBudget(max_tokens=0, max_items=3), [9999] * 4) == ([9999] * 3, [9999])
    assert TokenBudget(max_tokens=0).budget(2048) is None


def test_token_budget_default_derives_from_the_view() -> None:
    """A13: without a value of its own it takes the stage's."""
    assert TokenBudget().budget(2048) == 2048
    assert admit(TokenBudget(), [10, 10, 10], default_tokens=20) == ([10, 10], [10])


@pytest.mark.parametrize(
    "policy", [TokenBudget(max_tokens=200), TokenBudget(max_tokens=0), Fifo()], ids=repr
)
def test_admission_runs_an_item_of_unknown_size_alone(policy: AdmissionPolicy) -> None:
    """A4: unknown is never 0, with a budget or without."""
    assert admit(policy, [None, 1]) == ([None], [1])
    assert admit(policy, [1, None, 1]) == ([1], [None, 1])
    assert admit(policy, [None, None]) == ([None], [None])


def test_token_budget_leaves_the_rest_in_order() -> None:
    """A5, A6: after [100, 500, 100] with budget 200 the remainder is exactly [500, 100]."""
    policy = TokenBudget(max_tokens=200)
    assert admit(policy, [100, 500, 100]) == ([100], [500, 100])
    assert admit(policy, [500, 100]) == ([500], [100])
    assert admit(policy, [100]) == ([100], [])


def test_token_budget_admits_by_what_an_entry_can_take_of_it() -> None:
    """Prompts join with a part of their tokens: one that is larger than the room uses it up."""
    policy = TokenBudget(max_tokens=100)
    assert admit(policy, [60, 60, 60], divisible=True, tokens_free=1000) == ([60, 60], [60])
    assert admit(policy, [60, 60, 60], divisible=True, tokens_free=50) == ([60], [60, 60])
    assert admit(TokenBudget(max_tokens=0), [60] * 3, divisible=True, tokens_free=121) == (
        [60] * 3,
        [],
    )


def test_fifo_takes_what_there_is_room_for() -> None:
    assert admit(Fifo(), [9999] * 4, entries_free=3) == ([9999] * 3, [9999])
    assert admit(Fifo(), [60, 60, 60], divisible=True, tokens_free=100) == ([60, 60], [60])
    assert admit(Fifo(), [60, 60], divisible=True, tokens_free=60) == ([60], [60])
    assert admit(Fifo(), []) == ([], [])


@pytest.mark.parametrize(
    ("chunk", "chosen"),
    [
        ((0, 10), []),
        ((0, 11), [0]),
        ((19, 30), [0]),
        ((20, 30), []),
        ((12, 41), [0, 2]),
        ((50, 60), []),
    ],
)
def test_chunk_aware_selects_items_that_meet_the_chunk(
    chunk: tuple[int, int], chosen: list[int]
) -> None:
    """D1: only items whose span meets the chunk, and of those only the ones not encoded."""
    items = [
        ItemSpan(10, 20, ready=False),
        ItemSpan(30, 40, ready=True),
        ItemSpan(40, 50, ready=False),
    ]
    view = EncodingView(
        items=items,
        chunk_start=chunk[0],
        chunk_stop=chunk[1],
        chunk_tokens=512,
        prompt_tokens=60,
        arriving=True,
    )
    assert list(ChunkAware().select(view)) == chosen


def test_lru_evicts_what_was_let_go_first() -> None:
    order = Lru().build_order()
    for key in "abc":
        assert order.add(key, 1)
    order.reuse("a")
    order.add("a", 1)
    order.drop("b")
    assert list(order) == ["c", "a"]
    assert order.victim() == "c"


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
