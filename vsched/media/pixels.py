"""The pixel region of the arena: space for requests, and a cache for later ones.

A request acquires the space of all its images at once or not at all, so two requests can never wait for each other
while each holds a part. Acquisition is first come, first served: a small request does not overtake a large one, which
would starve otherwise. Unused entries stay until their space is needed; the oldest are evicted first.

Everything runs on the event loop between two awaits, so no lock is needed.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import OrderedDict, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.errors import RequestRefused, limit_message
from vsched.types import Extent

ALIGNMENT = 64


def aligned(size: int) -> int:
    """Round a size up to whole cache lines, so that no two extents share one."""
    return max(-(-size // ALIGNMENT), 1) * ALIGNMENT


class PixelStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the pixel region.

    `bytes_kept` is the size of unused entries, which a repeated image can still hit.
    """

    bytes_total: int
    bytes_held: int
    bytes_kept: int
    entries: int
    waiting: int
    hits: int
    misses: int
    evictions: int


@dataclass(slots=True)
class _PixelEntry:
    """An extent; `names` are its keys: that of its source, and that of its content if it is another.

    `changes` has the changes of a frame group's tokens since the previous group, float32; empty if nothing is pruned.
    """

    extent: Extent
    names: list[bytes]
    holders: int = 0
    filled: bool = False
    content: bytes = b""
    changes: bytes = b""


class _FreeList:
    """Free extents in address order; first fit, neighbours merged when freed."""

    def __init__(self, size: int) -> None:
        self._offsets: list[int] = [0] if size else []
        self._sizes: list[int] = [size] if size else []
        self.bytes = size

    def take_extent(self, size: int) -> int | None:
        for index, free in enumerate(self._sizes):
            if free >= size:
                offset = self._offsets[index]
                if free == size:
                    del self._offsets[index], self._sizes[index]
                else:
                    self._offsets[index] += size
                    self._sizes[index] -= size
                self.bytes -= size
                return offset
        return None

    def give_extent(self, offset: int, size: int) -> None:
        self.bytes += size
        index = bisect.bisect_left(self._offsets, offset)
        if index < len(self._offsets) and offset + size == self._offsets[index]:
            size += self._sizes[index]
            del self._offsets[index], self._sizes[index]
        if index > 0 and self._offsets[index - 1] + self._sizes[index - 1] == offset:
            self._sizes[index - 1] += size
            return
        self._offsets.insert(index, offset)
        self._sizes.insert(index, size)


class PixelLease:
    """Arena space of one request's images, held until `release`.

    Attributes:
        extents: Location of each key's pixels.
    """

    def __init__(self, store: PixelStore, extents: Mapping[bytes, Extent]) -> None:
        self.extents = extents
        self._store: PixelStore | None = store

    def release(self) -> None:
        """Release the space; idempotent."""
        store, self._store = self._store, None
        if store is not None:
            store.release_holds(self.extents)


class PixelStore:
    """Reference-counted extents in the arena's pixel region, by image key.

    Attributes:
        shared_fd: File descriptor for other processes to map the region; None if there is none, or if the region is
            empty.
    """

    def __init__(self, buffer: memoryview, shared_fd: int | None = None) -> None:
        self.shared_fd = shared_fd if buffer.nbytes else None
        self._buffer = buffer
        # A partial cache line at the end is not used.
        self._size = buffer.nbytes // ALIGNMENT * ALIGNMENT
        self._free = _FreeList(self._size)
        self._entries: dict[bytes, _PixelEntry] = {}
        self._kept: OrderedDict[bytes, None] = OrderedDict()
        self._kept_bytes = 0
        self._waiters: deque[tuple[asyncio.Future[PixelLease], Mapping[bytes, int]]] = deque()
        self._hits = 0
        self._misses = 0
        self._evictions = 0

    async def acquire(self, sizes: Mapping[bytes, int]) -> PixelLease:
        """Acquire the space of all these images at once; `sizes` maps each key to its bytes.

        Order: first come, first served.

        Blocks: until other requests have released enough; use a timeout. On cancellation, everything is released.

        Raises:
            RequestRefused: If they do not fit even into an empty region.
        """
        lease = self.acquire_nowait(sizes)
        if lease is not None:
            return lease
        future: asyncio.Future[PixelLease] = asyncio.get_running_loop().create_future()
        waiter = (future, sizes)
        self._waiters.append(waiter)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                future.result().release()
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
                self._serve_waiting()
            raise

    def acquire_nowait(self, sizes: Mapping[bytes, int]) -> PixelLease | None:
        """Like `acquire`, but return None instead of waiting.

        Raises:
            RequestRefused: If they do not fit even into an empty region.
        """
        needed = sum(aligned(size) for size in sizes.values())
        if needed > self._size:
            message = limit_message(
                "the images and videos of this request are larger than the pixel space",
                value=f"{needed} bytes of pixels",
                limit=f"{self._size} bytes",
                remedy="send fewer or smaller images or frames, or raise arena.pixel_bytes",
            )
            raise RequestRefused(message, code="pixels_exceeded", status=413)
        if self._waiters:
            return None
        return self._take_lease(sizes)

    def release_holds(self, keys: Mapping[bytes, Extent]) -> None:
        """Release one hold on each key."""
        for key in keys:
            self._drop_hold(key)
        self._serve_waiting()

    def add_holds(self, *keys: bytes) -> PixelLease:
        """Add a hold to entries that are already held, for the thread that fills them."""
        for key in keys:
            assert self._entries[key].holders > 0
            self._entries[key].holders += 1
        return PixelLease(self, {key: self._entries[key].extent for key in keys})

    def settle_lease(
        self, lease: PixelLease, unused: Collection[bytes] = ()
    ) -> tuple[dict[bytes, bytes], PixelLease]:
        """Exchange a lease on filled entries for one by content; return the content's key of each key, and that lease.

        So equal content has one extent for all requests that hold it, whatever it was decoded from. Entries in `unused`
        are released.
        """
        contents: dict[bytes, bytes] = {}
        for key in lease.extents:
            if key in unused:
                continue
            entry = self._entries[key]
            contents[key] = entry.content
            if entry.content not in self._entries:
                entry.names.append(entry.content)
                self._entries[entry.content] = entry
        extents: dict[bytes, Extent] = {}
        for content in dict.fromkeys(contents.values()):
            self._add_hold(content)
            extents[content] = self._entries[content].extent
        lease.release()
        return contents, PixelLease(self, extents)

    def is_filled(self, key: bytes) -> bool:
        """True if the pixels of a held key are complete."""
        return self._entries[key].filled

    def mark_filled(self, key: bytes, content: bytes = b"", changes: bytes = b"") -> None:
        """Mark the pixels of a held key as complete; `content` is the key of their content if it is another."""
        entry = self._entries[key]
        entry.filled, entry.content, entry.changes = True, content or key, changes

    def changes(self, key: bytes) -> bytes:
        """Return the changes of a held frame group's tokens; see `mark_filled`."""
        return self._entries[key].changes

    def view(self, extent: Extent) -> npt.NDArray[np.uint8]:
        """Bytes of an extent; writable, and valid while it is held."""
        return np.frombuffer(self._buffer, np.uint8, extent.size, extent.offset)

    def clear(self) -> int:
        """Evict all unused entries; return the bytes freed."""
        freed = self._kept_bytes
        while self._kept:
            self._evict()
        self._serve_waiting()
        return freed

    def statistics(self) -> PixelStatistics:
        """Return a snapshot."""
        return PixelStatistics(
            bytes_total=self._size,
            bytes_held=self._size - self._free.bytes - self._kept_bytes,
            bytes_kept=self._kept_bytes,
            entries=len({id(entry) for entry in self._entries.values()}),
            waiting=len(self._waiters),
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
        )

    def _serve_waiting(self) -> None:
        while self._waiters:
            future, sizes = self._waiters[0]
            if not future.done():
                lease = self._take_lease(sizes)
                if lease is None:
                    return
                future.set_result(lease)
            self._waiters.popleft()

    def _take_lease(self, sizes: Mapping[bytes, int]) -> PixelLease | None:
        """Hold or create every entry; if that fails, only the attempted evictions remain."""
        absent = [key for key in sizes if key not in self._entries]
        present = [key for key in sizes if key in self._entries]
        kept = sum(
            aligned(self._entries[key].extent.size)
            for key in present
            if self._entries[key].holders == 0
        )
        needed = sum(aligned(sizes[key]) for key in absent)
        if needed > self._free.bytes + self._kept_bytes - kept:
            return None
        for key in present:
            self._add_hold(key)
        created: list[bytes] = []
        for key in absent:
            offset = self._allocate(aligned(sizes[key]))
            if offset is None:
                # Enough bytes, but fragmented: the holders of the extents in between will release them.
                for undone in (*created, *present):
                    self._drop_hold(undone)
                if self._free.bytes + self._kept_bytes < self._size:
                    return None
                # There are no other holders: these images' own pixels lie in between.
                while self._kept:
                    self._evict()
                return self._take_lease(sizes)
            self._entries[key] = _PixelEntry(Extent(offset, sizes[key]), [key], holders=1)
            created.append(key)
        self._hits += sum(self._entries[key].filled for key in present)
        self._misses += len(absent)
        return PixelLease(self, {key: self._entries[key].extent for key in sizes})

    def _allocate(self, size: int) -> int | None:
        while (offset := self._free.take_extent(size)) is None and self._kept:
            self._evict()
        return offset

    def _evict(self) -> None:
        key, _ = self._kept.popitem(last=False)
        size = aligned(self._entries[key].extent.size)
        self._kept_bytes -= size
        self._evictions += 1
        self._remove(key)

    def _remove(self, key: bytes) -> None:
        entry = self._entries[key]
        for name in entry.names:
            del self._entries[name]
        self._free.give_extent(entry.extent.offset, aligned(entry.extent.size))

    def _add_hold(self, key: bytes) -> None:
        entry = self._entries[key]
        if entry.holders == 0:
            del self._kept[entry.names[0]]
            self._kept_bytes -= aligned(entry.extent.size)
        entry.holders += 1

    def _drop_hold(self, key: bytes) -> None:
        entry = self._entries[key]
        entry.holders -= 1
        assert entry.holders >= 0
        if entry.holders:
            return
        if entry.filled:
            self._kept[entry.names[0]] = None
            self._kept_bytes += aligned(entry.extent.size)
        else:
            # Space without pixels is useless as a cache entry.
            self._remove(key)
