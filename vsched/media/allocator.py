"""Memory of large images in the C library's allocator."""

from __future__ import annotations

import ctypes

LARGE_BYTES = 8 << 20
_M_MMAP_THRESHOLD = -3


def map_large_blocks() -> None:
    """Use separate mappings for large allocations of this process; no-op unless the C library is glibc."""
    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
    except (OSError, AttributeError):
        return


def return_freed_memory() -> None:
    """Return free heap pages of this process to the system; no-op unless the C library is glibc.

    Blocks: some milliseconds; call it off the event loop.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return
    trim(0)
