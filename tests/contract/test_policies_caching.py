"""Decisions of each encoding, eviction and insertion policy, case by case."""

from __future__ import annotations

import random
from collections.abc import Hashable

import pytest

from vsched.policy import (
    CachePolicy,
    EncodingView,
    EvictionOrder,
    ImagePolicy,
    InsertionView,
    ItemSpan,
)
from vsched_policies.encoding import ChunkAware
from vsched_policies.eviction import KeepNothing, Lru, S3Fifo
from vsched_policies.insertion import Everything, Matching


def select(
    policy: ImagePolicy, chunk: tuple[int, int], *, ready: tuple[int, ...] = (1,)
) -> list[int]:
    """Call the policy with items at [10, 20), [30, 40) and [40, 50) of a prompt of 60 tokens."""
    spans = [(10, 20), (30, 40), (40, 50)]
    items = [
        ItemSpan(start, stop, ready=index in ready) for index, (start, stop) in enumerate(spans)
    ]
    view = EncodingView(
        items=items,
        chunk_start=chunk[0],
        chunk_stop=chunk[1],
        chunk_tokens=10,
        prompt_tokens=60,
        arriving=chunk[0] == 0,
    )
    return list(policy.select(view))


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
def test_chunk_aware_selects_items_of_the_chunk(chunk: tuple[int, int], chosen: list[int]) -> None:
    """Only items whose span overlaps the chunk, and of those only the ones not encoded."""
    assert select(ChunkAware(), chunk) == chosen


def filled(policy: CachePolicy, keys: str) -> EvictionOrder[Hashable]:
    """Return an order with entries of these keys, each of size 1."""
    order = policy.build_order()
    assert all(order.add(key, 1) for key in keys)
    return order


def test_lru_evicts_the_entry_released_first() -> None:
    order = filled(Lru(), "abc")
    order.reuse("a")
    order.add("a", 1)
    order.drop("b")
    assert list(order) == ["c", "a"]
    assert order.victim() == "c"


def test_none_keeps_nothing() -> None:
    order = KeepNothing().build_order()
    assert order.add("a", 1) is False
    assert (len(order), list(order)) == (0, [])


def evict(order: EvictionOrder[Hashable]) -> Hashable:
    key = order.victim()
    order.drop(key)
    return key


def hit(order: EvictionOrder[Hashable], key: Hashable, size: int = 1) -> None:
    order.reuse(key)
    order.add(key, size)


def test_s3_fifo_spares_entries_with_hits() -> None:
    """One-hit wonders go first, however recent; the others follow in turn."""
    order = filled(S3Fifo(small_share=0.1), "abcde")
    hit(order, "a")
    hit(order, "c")
    assert [evict(order) for _ in range(5)] == ["b", "d", "e", "a", "c"]


def test_s3_fifo_lets_a_scan_pass() -> None:
    """A thousand entries that are used once do not evict repeatedly used ones, as they do with LRU."""
    orders = {"s3-fifo": S3Fifo().build_order(), "lru": Lru().build_order()}
    kept: dict[str, int] = {}
    for name, order in orders.items():
        for key in range(10):
            order.add(key, 1)
        for key in range(10):
            hit(order, key)
        for key in range(1000, 2000):
            order.add(key, 1)
            if len(order) > 20:
                evict(order)
        kept[name] = len(set(order) & set(range(10)))
    assert kept == {"s3-fifo": 10, "lru": 0}


def test_s3_fifo_takes_a_ghost_back_into_the_main_queue() -> None:
    order = filled(S3Fifo(), "abc")
    assert evict(order) == "a"
    order.add("a", 1)
    order.add("d", 1)
    assert [evict(order) for _ in range(4)] == ["b", "c", "d", "a"], "a came back, and is in main"


def test_s3_fifo_forgets_ghosts() -> None:
    order = filled(S3Fifo(ghosts=1, small_share=0.5), "abcd")
    assert [evict(order), evict(order)] == ["a", "b"]
    order.add("a", 1)
    assert [evict(order) for _ in range(3)] == ["c", "d", "a"], "a was forgotten, and is in small"
    order.add("c", 1)
    order.add("d", 1)
    assert evict(order) == "c", "c was forgotten for d and a"


def test_s3_fifo_counts_bytes() -> None:
    """A small queue of few large entries is as full as one of many small ones."""
    order = S3Fifo(small_share=0.5).build_order()
    order.add("m", 10)
    hit(order, "m", 10)
    for key, size in (("x", 1), ("y", 4), ("z", 4)):
        order.add(key, size)
    assert order.victim() == "m", "m has moved on to main, and small holds 9 of 19: under its share"
    order.add("w", 2)
    assert order.victim() == "x", "small holds 11 of 21: over its share"


def test_s3_fifo_spares_an_entry_once_for_each_hit() -> None:
    order = S3Fifo().build_order()
    for key in "ab":
        order.add(key, 1)
        hit(order, key)
    assert order.victim() == "a", "both are in main now, and their hits are spent"
    for key in "aab":
        hit(order, key)
    assert [evict(order), evict(order)] == ["b", "a"]


def blocks(name: str, count: int) -> list[bytes]:
    return [random.Random(f"{name} {index}").randbytes(16) for index in range(count)]


def ask(
    policy: CachePolicy,
    prompt: list[bytes],
    answer: list[bytes],
    *,
    found: int = 0,
    tenant: str = "",
) -> int:
    view = InsertionView(
        now_ns=0,
        hashes=[*prompt, *answer],
        prompt_blocks=len(prompt),
        found=found,
        block_tokens=4,
        prompt_tokens=4 * len(prompt),
        output_tokens=4 * len(answer),
        tenant=tenant,
    )
    return policy.keep(view)


SOME = Matching(tenants=("a",), tokens_min=8, tokens_max=40)


@pytest.mark.parametrize(
    ("policy", "tokens", "tenant", "kept"),
    [
        (Everything(), 12, "", 5),
        (Matching(), 12, "any", 5),
        (SOME, 8, "a", 4),
        (SOME, 4, "a", 0),
        (SOME, 40, "a", 12),
        (SOME, 44, "a", 0),
        (SOME, 8, "b", 0),
        (SOME, 8, "", 0),
    ],
)
def test_insertion_keeps_outputs_too_by_tenants_and_lengths(
    policy: CachePolicy, tokens: int, tenant: str, kept: int
) -> None:
    assert ask(policy, blocks("p", tokens // 4), blocks("answer", 2), tenant=tenant) == kept
