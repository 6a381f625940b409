"""Host memory as a `DeviceMemory`."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vsched.worker.memory import (
    host_available,
    host_total,
    process_limit,
    reports_free_memory,
    status_bytes,
)
from vsched.worker.spec import usable_cores
from vsched_workers.memory.out_of_memory import require_available, typed_out_of_memory

DRIFT_BYTES = 8 << 20
"""Growth of the interpreter and compiled code that is allowed once they are warm."""

SCATTERED_SHARE = 2
"""The share of a measured growth, 1 / this, that heap fragmentation may add to it; see docs/memory.md."""

MAPPED_BYTES_MIN = 64 << 10
"""The smallest allocation that has a mapping of its own while the heap must not be fragmented."""

_HUGE_PAGE = 2 << 20
_LINE = 64
"""Bytes of a cache line; each weight begins at one."""
_SPARE_SHARE, _SPARE_BYTES_MAX = 8, 64 << 20
"""A new mapping is larger than its first allocation by at most this share of all mappings, and this many bytes."""

_M_MMAP_THRESHOLD = -3
"""The number of this option in `malloc.h`."""

_PEAK_RESET = Path("/proc/self/clear_refs")


class HostMemory:
    """The memory of a CPU worker, counted in the same way as the limit on it.

    Under a limit on the process, that is its private writable mappings, touched or not (`VmData`). The kernel keeps no
    peak of these, but of all address space (`VmPeak`), which cannot be reset; yet a mapping without access counts as
    address space and not towards the limit. `reset_peak` maps enough to lift the address space to its old peak, so that
    every later mapping is a new peak. Address space that is not private memory (files, code) may have grown in between
    without being part of the peak; it is added, which errs on the safe side.

    Without a limit on the process, the host's or the control group's memory is the bound, and resident memory counts.
    """

    def __init__(self, name: str = "cpu", *, promises: bool = False) -> None:
        """Measure; `promises` allows reserved memory to be backed on use, if that is reliable."""
        self.name = name
        self._may_promise = promises
        self._ballast: mmap.mmap | None = None
        self._other_bytes = 0

    @property
    def pool(self) -> str:
        return "cpu" if self._limit() is None else f"cpu limit of {os.getpid()}"

    @property
    def promises(self) -> bool:
        """Whether the host backs reserved memory only when it is used.

        Only if reserved memory is counted, by the limit on the process: then sizes are verified without touching pages.
        And only if the host reports its free memory: the limits of all ranks were chosen within that.
        """
        return self._may_promise and self.counts_reserved and reports_free_memory()

    @property
    def counts_reserved(self) -> bool:
        """Whether memory counts when it is reserved, or else when it is touched."""
        return self._limit() is not None

    def total(self) -> int:
        host = host_total()
        limit = process_limit()
        return host if limit is None else min(limit, host)

    def available(self) -> int:
        host, limit = host_available(), process_limit()
        return host if limit is None else max(0, min(host, limit - status_bytes("VmData")))

    def reserved(self) -> int:
        return status_bytes("RssAnon" if self._limit() is None else "VmData")

    def allocated(self) -> int:
        # The C library does not report the used part of its heap, so release the unused part first.
        self.release()
        return self.reserved()

    def peak(self) -> int:
        if self._limit() is None:
            gone = status_bytes("VmHWM") - status_bytes("VmRSS")
            counted, other = status_bytes("RssAnon"), _resident_files()
        else:
            gone = status_bytes("VmPeak") - status_bytes("VmSize")
            counted, other = status_bytes("VmData"), _unlimited_space()
        return counted + max(0, gone) + max(0, other - self._other_bytes)

    def reset_peak(self) -> None:
        if self._limit() is None:
            # Writing 5 resets the high-water mark. If the kernel does not allow it, the old peak stays, which errs on
            # the safe side.
            with suppress(OSError):
                _PEAK_RESET.write_text("5", encoding="ascii")
            self._other_bytes = _resident_files()
            return
        if self._ballast is not None:
            self._ballast.close()
            self._ballast = None
        gap = status_bytes("VmPeak") - status_bytes("VmSize")
        if gap > 0:
            self._ballast = map_private(gap, access=0)
        self._other_bytes = _unlimited_space()

    def drift(self, growth_bytes: int) -> int:
        """Return the allowance for fragmentation: after other batches, the heap has another layout."""
        return DRIFT_BYTES + growth_bytes // SCATTERED_SHARE

    def release(self) -> None:
        """Return free heap pages to the host, if the C library can."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def settle(self) -> None:
        """If memory is promised, return the heap pages that the largest steps left."""
        if self.promises:
            self.release()

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Map `size` bytes, and touch each page of them unless memory is promised."""
        if not size:
            yield
            return
        require_available(self, size, "memory to hold back")
        with typed_out_of_memory("holding memory back"):
            held = map_private(size, access=mmap.PROT_READ | mmap.PROT_WRITE)
        with held:
            if self.promises:
                yield
                return
            np.frombuffer(held, dtype=np.uint8)[:: mmap.PAGESIZE] = 1
            yield

    def _limit(self) -> int | None:
        """Return the process limit if it is the tighter bound."""
        limit = process_limit()
        return limit if limit is not None and limit <= host_total() else None


@contextmanager
def mapped_pieces() -> Iterator[None]:
    """Have the C library map larger allocations separately, if they fit no hole, until the context ends.

    Mappings leave no holes in the heap and are returned as a whole. This is for one-time work: mapping and unmapping
    pages for every allocation costs the batches of a small encoder up to 48 % of their speed. It does nothing outside
    of ranks, as only these have their heap configured.
    """
    usual = os.environ.get("MALLOC_MMAP_THRESHOLD_")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if usual is None or mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, int(usual))


def map_private(size: int, *, access: int = mmap.PROT_READ | mmap.PROT_WRITE) -> mmap.mmap:
    """Return a separate mapping, which is unmapped when its last reference is gone."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=access)


class HugePages:
    """An arena of huge pages; a mapping is returned with its last allocation.

    A step reads all weights once, from more pages than the TLB holds: with huge pages it takes 4 to 5 % less time. If
    the host has no huge pages, or a mapping is not aligned to one, pages are small.

    Attributes:
        mapped: Bytes of all mappings that were created. Parts without allocations are untouched.
    """

    def __init__(self) -> None:
        self.mapped = 0
        self._rest: tuple[int, int] = (0, 0)
        # A weak reference: only allocations keep a mapping alive.
        self._rest_of: weakref.ref[mmap.mmap] | None = None
        self._lock = threading.Lock()

    def allocate_bytes(self, size: int) -> npt.NDArray[np.uint8]:
        """Return `size` zeroed bytes, aligned to a cache line, in the largest remainder of a mapping or a new one."""
        whole = -(-size // _LINE) * _LINE
        with self._lock:
            mapped = None if self._rest_of is None else self._rest_of()
            start, stop = self._rest
            if mapped is not None and stop - start >= whole:
                self._rest = start + whole, stop
                return np.frombuffer(mapped, dtype=np.uint8, count=size, offset=start)
            # Reserve space for more allocations of this size, up to a small share of all mappings.
            count = max(min(self.mapped // _SPARE_SHARE, _SPARE_BYTES_MAX) // whole, 1)
            wanted = -(-count * whole // _HUGE_PAGE) * _HUGE_PAGE
            self.mapped += wanted
            new = _map_huge(wanted)
            if mapped is None or wanted - whole >= stop - start:
                self._rest, self._rest_of = (whole, wanted), weakref.ref(new)
            return np.frombuffer(new, dtype=np.uint8, count=size)


def _map_huge(size: int) -> mmap.mmap:
    mapped = map_private(size)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def zeroed_pages(size: int, *, touch: bool) -> npt.NDArray[np.uint8]:
    """Return `size` zeroed bytes.

    The host hands out pages on first touch. `touch` does that now, so that no step waits for pages or is the first to
    find that there are none. The memory is a separate mapping, so that it returns to the host with its last user, of
    huge pages: walking a block table over small pages takes three times as long.
    """
    array = np.frombuffer(_map_huge(size), dtype=np.uint8)
    if touch:
        _touch(array)
    return array


def _touch(array: npt.NDArray[np.uint8]) -> None:
    """Write all of it, on every core: the system may have to compact memory for huge pages first (0.5 GiB/s)."""
    cores = usable_cores()
    try:
        with ThreadPoolExecutor(cores) as pool:
            for _ in pool.map(lambda part: part.fill(0), np.array_split(array, cores)):
                pass
    except RuntimeError:  # near a limit there may be no space for a thread's stack
        array.fill(0)


def _resident_files() -> int:
    return status_bytes("RssFile") + status_bytes("RssShmem")


def _unlimited_space() -> int:
    """Return the address space that the limit does not count."""
    return status_bytes("VmSize") - status_bytes("VmData")
