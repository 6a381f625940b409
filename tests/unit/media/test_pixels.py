from __future__ import annotations

import asyncio
import itertools
import random

import numpy as np
import pytest

from vsched.errors import RequestRefused
from vsched.media.pixels import ALIGNMENT, PixelLease, PixelStore

UNIT = ALIGNMENT


def store_of(units: int) -> PixelStore:
    return PixelStore(memoryview(bytearray(units * UNIT)))


def take(store: PixelStore, **units: int) -> PixelLease:
    lease = store.acquire_nowait({name.encode(): count * UNIT for name, count in units.items()})
    assert lease is not None
    return lease


def fill(store: PixelStore, lease: PixelLease) -> PixelLease:
    for key in lease.extents:
        store.mark_filled(key)
    return lease


def test_extents_do_not_share_cache_lines() -> None:
    store = store_of(3)
    lease = store.acquire_nowait({b"a": 4, b"b": 8})
    assert lease is not None
    assert lease.extents[b"b"].offset == UNIT
    assert store.view(lease.extents[b"b"]).view(np.float32).shape == (2,)


def test_eviction_takes_the_oldest_unheld_first() -> None:
    store = store_of(3)
    for name in ("a", "b", "c"):
        fill(store, take(store, **{name: 1})).release()
    take(store, a=1).release()
    held = take(store, c=1)
    fill(store, take(store, d=1)).release()
    assert store.statistics().evictions == 1
    take(store, a=1).release()
    assert store.statistics().hits == 3
    held.release()
    take(store, b=1)
    assert store.statistics().hits == 3


def test_never_fitting_is_refused_before_anything_is_evicted() -> None:
    """Value, limit and remedy at once."""
    store = store_of(4)
    fill(store, take(store, a=1)).release()
    with pytest.raises(RequestRefused, match=r"value 320 bytes.*limit 256 bytes.*Remedy"):
        take(store, b=2, c=3)
    assert store.statistics().entries == 1


async def test_acquire_waits_in_order_and_holds_nothing_meanwhile() -> None:
    """All at once; a small waiter does not overtake a large one."""
    store = store_of(4)
    first, second = take(store, a=2), take(store, b=2)
    order: list[str] = []

    async def want(name: str, sizes: dict[bytes, int]) -> PixelLease:
        lease = await store.acquire(sizes)
        order.append(name)
        return lease

    async with asyncio.TaskGroup() as group:
        large = group.create_task(want("large", {b"c": UNIT, b"d": 2 * UNIT}))
        await asyncio.sleep(0)
        small = group.create_task(want("small", {b"e": UNIT}))
        await asyncio.sleep(0)
        first.release()
        await asyncio.sleep(0)
        assert store.statistics().waiting == 2
        assert store.statistics().bytes_held == 2 * UNIT
        second.release()
    assert order == ["large", "small"]
    large.result().release()
    small.result().release()
    assert store.statistics().bytes_held == 0


async def test_cancelled_waiter_leaves_nothing_and_lets_the_next_in() -> None:
    """Cancellation while waiting."""
    store = store_of(4)
    held = take(store, a=3)
    large = asyncio.ensure_future(store.acquire({b"b": 4 * UNIT}))
    small = asyncio.ensure_future(store.acquire({b"c": UNIT}))
    await asyncio.sleep(0)
    large.cancel()
    lease = await small
    assert large.cancelled()
    held.release()
    lease.release()
    assert store.statistics().bytes_held == 0
    assert store.statistics().waiting == 0


async def test_cancelled_just_after_the_grant_gives_it_back() -> None:
    """The grant and the cancellation coincide."""
    store = store_of(1)
    held = take(store, a=1)
    waiter = asyncio.ensure_future(store.acquire({b"b": UNIT}))
    await asyncio.sleep(0)
    held.release()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert store.statistics().bytes_held == 0
    take(store, c=1).release()


def test_own_pixels_in_the_way_give_way() -> None:
    """Pixels kept by the request itself, which fragment the space, are evicted: a wait for them would not end."""
    store = store_of(5)
    lease = take(store, a=2, b=1, c=2)
    store.mark_filled(b"b")
    lease.release()
    assert store.statistics().bytes_kept == UNIT
    again = take(store, b=1, d=4)
    assert not store.is_filled(b"b")
    again.release()
    assert store.statistics().bytes_held == 0


def test_own_pixels_stay_while_another_request_will_release() -> None:
    store = store_of(5)
    lease = take(store, a=1, b=1, c=1, d=2)
    store.mark_filled(b"b")
    lease.release()
    other = take(store, c=1)
    assert other.extents[b"c"].offset == 0
    assert store.acquire_nowait({b"b": UNIT, b"e": 3 * UNIT}) is not None
    assert store.is_filled(b"b")


def test_space_in_pieces_leaves_a_request_with_nothing() -> None:
    """If the second image finds no space, neither the first nor one that was there before stays held."""
    store = store_of(6)
    leases = {name: take(store, **{name: 1}) for name in "abcdef"}
    fill(store, leases["b"])
    for name in "ace":
        leases[name].release()
    assert store.acquire_nowait({b"b": UNIT, b"g": UNIT, b"h": 2 * UNIT}) is None
    assert store.statistics().bytes_held == 3 * UNIT
    leases["b"].release()
    assert store.statistics().bytes_held == 2 * UNIT
    take(store, g=1, h=2).release()


@pytest.mark.parametrize("seed", range(5))
def test_random_use_never_overlaps_and_returns_everything(seed: int) -> None:
    rng = random.Random(seed)
    store = store_of(16)
    leases: list[PixelLease] = []
    for _ in range(200):
        if leases and rng.random() < 0.5:
            lease = leases.pop(rng.randrange(len(leases)))
            if rng.random() < 0.7:
                fill(store, lease)
            lease.release()
        else:
            keys = rng.sample(range(12), rng.randint(1, 3))
            taken = store.acquire_nowait({bytes([key]): (1 + key % 4) * UNIT - 4 for key in keys})
            if taken is not None:
                leases.append(taken)
        spans = sorted(
            {
                (extent.offset, extent.offset + extent.size)
                for lease in leases
                for extent in lease.extents.values()
            }
        )
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))
        statistics = store.statistics()
        assert statistics.bytes_held + statistics.bytes_kept <= statistics.bytes_total
    for lease in leases:
        lease.release()
    store.clear()
    assert store.statistics().entries == 0
    assert store.acquire_nowait({b"whole": 16 * UNIT}) is not None


def test_equal_content_has_one_extent() -> None:
    """Of two extents with the same content, the first is that of all requests, and is evicted once."""
    store = store_of(4)
    lease = take(store, a=1, b=1, c=1)
    for key, content in zip(b"abc", (b"x", b"y", b"x"), strict=True):
        store.mark_filled(bytes([key]), content)
    first = lease.extents[b"a"]
    contents, settled = store.settle(lease)
    assert contents == {b"a": b"x", b"b": b"y", b"c": b"x"}
    assert settled.extents[b"x"] == first
    assert store.statistics().bytes_held == 2 * UNIT
    other = take(store, d=1)
    store.mark_filled(b"d", b"y")
    contents, shared = store.settle(other)
    assert shared.extents[b"y"] == settled.extents[b"y"]
    settled.release()
    assert store.statistics().bytes_held == UNIT
    assert store.is_filled(b"y")
    repeated = take(store, a=1, b=1)
    assert (repeated.extents[b"a"], store.is_filled(b"a")) == (first, True)
    repeated.release()
    shared.release()
    store.clear()
    assert store.statistics().entries == 0
    assert store.acquire_nowait({b"whole": 4 * UNIT}) is not None


@pytest.mark.parametrize("seed", range(5))
def test_random_use_with_contents_returns_everything(seed: int) -> None:
    """Extents of different contents never overlap, also if entries with two keys are evicted."""
    rng = random.Random(seed)
    store = store_of(12)
    leases: list[PixelLease] = []
    for _ in range(300):
        if len(leases) > rng.randrange(4):
            leases.pop(rng.randrange(len(leases))).release()
            continue
        keys = [bytes([key]) for key in rng.sample(range(9), rng.randint(1, 3))]
        lease = store.acquire_nowait(dict.fromkeys(keys, UNIT))
        if lease is None:
            continue
        if rng.random() < 0.2:
            lease.release()
            continue
        for key in keys:
            store.mark_filled(key, b"content %d" % (key[0] % 4))
        leases.append(store.settle(lease)[1])
        held = {content: one for lease in leases for content, one in lease.extents.items()}
        assert len({one.offset for one in held.values()}) == len(held)
        assert store.statistics().bytes_held == len(held) * UNIT
    for lease in leases:
        lease.release()
    store.clear()
    assert store.statistics().entries == 0
    assert store.acquire_nowait({b"whole": 12 * UNIT}) is not None
