"""Simulated device memory: a caching allocator with fragmentation, on a device shared with other processes.

It models the differences between a real allocator and a sum of sizes: sizes are rounded up, small
requests share segments, a freed block is cached and split by later requests, neighbours merge
within a segment but never across two, and only entirely free segments return to the device.
Everything is deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from vsched.errors import DeviceOutOfMemory

_MIB = 1 << 20


@dataclass(slots=True)
class _Block:
    offset: int
    size: int
    handle: int | None = None


@dataclass(slots=True)
class _Segment:
    """Memory taken from the device in one piece; its blocks cover it without gaps, ordered by offset."""

    size: int
    small: bool
    blocks: list[_Block] = field(default_factory=list)

    def merge_free(self) -> None:
        merged: list[_Block] = []
        for block in self.blocks:
            if merged and block.handle is None and merged[-1].handle is None:
                merged[-1].size += block.size
            else:
                merged.append(block)
        self.blocks = merged

    @property
    def is_free(self) -> bool:
        return all(block.handle is None for block in self.blocks)


class SimulatedMemory:
    """A device of a fixed size. Implements `DeviceMemory`; a model's allocations go through `allocate` and `free`.

    Attributes:
        allocations: Number of allocations so far, including failed ones.
    """

    ROUNDING = 512
    SMALL_MAX = 1 * _MIB
    """Requests up to this size share segments of 2 MiB."""
    name = "simulated"
    SHARED_MAX = 10 * _MIB
    """Requests up to this size take a new segment of 20 MiB if none has enough space; larger ones take their own."""

    def __init__(
        self,
        total_bytes: int,
        *,
        pool: str = "simulated",
        peers_bytes: int = 0,
    ) -> None:
        self.pool = pool
        self.allocations = 0
        self._total_bytes = total_bytes
        self._peers_bytes = peers_bytes
        self._segments: list[_Segment] = []
        self._of_handle: dict[int, _Segment] = {}
        self._peak_bytes = 0
        self._fails: set[int] = set()

    def total(self) -> int:
        return self._total_bytes

    def available(self) -> int:
        """Return the memory not held by any process; cached memory counts as held."""
        return max(self._total_bytes - self._peers_bytes - self.reserved(), 0)

    def reserved(self) -> int:
        return sum(segment.size for segment in self._segments)

    def allocated(self) -> int:
        """Return the memory in use; the rest of `reserved` is cache."""
        return sum(
            block.size
            for segment in self._segments
            for block in segment.blocks
            if block.handle is not None
        )

    def peak(self) -> int:
        return max(self._peak_bytes, self.reserved())

    def reset_peak(self) -> None:
        self._peak_bytes = self.reserved()

    def drift(self, growth_bytes: int) -> int:
        return 0

    def release(self) -> None:
        """Return every entirely free segment to the device."""
        self._segments = [segment for segment in self._segments if not segment.is_free]

    def settle(self) -> None:
        """No-op: keep the cache."""

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Hold memory within the context.

        Raises:
            DeviceOutOfMemory: When there is not enough.
        """
        handle = self.allocate(size) if size else None
        try:
            yield
        finally:
            if handle is not None:
                self.free(handle)

    def set_peers_bytes(self, size: int) -> None:
        """Set the memory held by other processes."""
        self._peers_bytes = size

    def fail_at(self, number: int) -> None:
        """Make an allocation fail: 1 is the next one, 2 the one after it."""
        assert number >= 1, "the past cannot fail"
        self._fails.add(self.allocations + number)

    def heal(self) -> None:
        """Cancel all planned failures."""
        self._fails.clear()

    def allocate(self, size: int) -> int:
        """Allocate memory; return a handle for `free`.

        Raises:
            DeviceOutOfMemory: When neither the cache nor the device has a large enough block, or
                due to `fail_at`.
        """
        assert size > 0, "nothing to allocate"
        self.allocations += 1
        if self.allocations in self._fails:
            raise self._out_of_memory(size, "injected; ")
        need = _round_up(size, self.ROUNDING)
        small = need <= self.SMALL_MAX
        cached = [
            (block.size, number, index)
            for number, segment in enumerate(self._segments)
            if segment.small == small
            for index, block in enumerate(segment.blocks)
            if block.handle is None and block.size >= need
        ]
        if not cached:
            self._add_segment(size, need, small=small)
        _, number, index = min(cached, default=(need, -1, 0))  # the smallest that fits
        segment = self._segments[number]
        block = segment.blocks[index]
        if block.size > need:
            segment.blocks.insert(index + 1, _Block(block.offset + need, block.size - need))
            block.size = need
        block.handle = self.allocations
        self._of_handle[self.allocations] = segment
        return self.allocations

    def free(self, handle: int) -> None:
        """Return an allocation to the cache."""
        segment = self._of_handle.pop(handle)
        next(block for block in segment.blocks if block.handle == handle).handle = None
        segment.merge_free()

    def check_invariants(self) -> None:
        """Check that blocks cover their segments and that the counts agree."""
        for segment in self._segments:
            stop = 0
            for block in segment.blocks:
                assert block.offset == stop, f"a gap or an overlap at {stop}"
                assert block.size > 0, "an empty block"
                stop += block.size
            assert stop == segment.size, "the blocks do not cover their segment"
        handles = sorted(
            block.handle
            for segment in self._segments
            for block in segment.blocks
            if block.handle is not None
        )
        assert handles == sorted(self._of_handle), "a handle without a block"
        assert self.allocated() <= self.reserved() <= self.peak(), "more in use than held"

    def _add_segment(self, size: int, need: int, *, small: bool) -> None:
        """Take a segment of one free block from the device, after the cache if that does not suffice."""
        taken = 20 * _MIB if need <= self.SHARED_MAX else _round_up(need, 2 * _MIB)
        if small:
            taken = 2 * _MIB
        if taken > self.available():
            self.release()
        if taken > self.available():
            raise self._out_of_memory(size, "")
        self._segments.append(_Segment(taken, small, [_Block(0, taken)]))
        self._peak_bytes = max(self._peak_bytes, self.reserved())

    def _out_of_memory(self, size: int, why: str) -> DeviceOutOfMemory:
        cached_bytes = self.reserved() - self.allocated()
        return DeviceOutOfMemory(
            f"memory ran out on {self.name} ({why}{cached_bytes} bytes are cached): value {size} bytes, "
            f"limit {self.available()} bytes free of {self._total_bytes}",
            remedy="allocate less, or free memory on the device",
        )


def _round_up(size: int, to: int) -> int:
    return -(-size // to) * to
