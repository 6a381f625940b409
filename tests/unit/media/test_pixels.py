from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from tests.each_case import each_case
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
    """Also just after the grant."""
    store = store_of(4)
    held = take(store, a=3)
    large, small, last = (
        asyncio.ensure_future(store.acquire({name: units * UNIT}))
        for name, units in ((b"b", 4), (b"c", 1), (b"d", 4))
    )
    await asyncio.sleep(0)
    large.cancel()
    lease = await small
    lease.release()
    held.release()
    last.cancel()
    with pytest.raises(asyncio.CancelledError):
        await last
    assert large.cancelled()
    statistics = store.statistics()
    assert (statistics.bytes_held, statistics.waiting) == (0, 0)
    take(store, e=4).release()


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


@each_case("seed", range(10))
def test_random_use_never_overlaps_and_returns_everything(seed: int) -> None:
    """Also if images fail, if contents are equal, and if entries with two keys are evicted."""
    rng = random.Random(seed)
    store = store_of(16)
    leases: list[PixelLease] = []
    for _ in range(300):
        if len(leases) > rng.randrange(4):
            leases.pop(rng.randrange(len(leases))).release()
            continue
        numbers = rng.sample(range(12), rng.randint(1, 3))
        sizes = {bytes([number]): (1 + number % 4) * UNIT - 4 for number in numbers}
        lease = store.acquire_nowait(sizes)
        if lease is None:
            continue
        if rng.random() < 0.3:
            lease.release()
            continue
        for key in sizes:
            store.mark_filled(key, b"content %d" % (key[0] % 8))
        leases.append(store.settle_lease(lease)[1])
        held = {content: one for lease in leases for content, one in lease.extents.items()}
        spans = sorted((one.offset, one.offset + one.size) for one in held.values())
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))
        statistics = store.statistics()
        assert statistics.bytes_held == sum(-(-one.size // UNIT) * UNIT for one in held.values())
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
    contents, settled = store.settle_lease(lease)
    assert contents == {b"a": b"x", b"b": b"y", b"c": b"x"}
    assert settled.extents[b"x"] == first
    assert store.statistics().bytes_held == 2 * UNIT
    other = take(store, d=1)
    store.mark_filled(b"d", b"y")
    contents, shared = store.settle_lease(other)
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
