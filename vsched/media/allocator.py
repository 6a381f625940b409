"""Return freed image memory to the system without blocking other threads.

Images of all sizes fragment the heaps of the threads: after 320 images two threads kept 300 MB outside of any budget,
and trimming reduces that to 10 MB. Mapping every large allocation separately (`M_MMAP_THRESHOLD`) would keep it there,
but took 45 % longer because of page faults for each image. So only the blocks of very large images are mapped: trimming
256 MB of heap locked it for 30 to 60 ms.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

from PIL import Image

LARGE_BYTES = 8 << 20
"""Pillow stores the pixels of an image in blocks of 16 MiB."""
_M_MMAP_THRESHOLD = -3
_PIXEL_BYTES = 4
_BLOCKS_MAX = 1 << 10
_POOL = threading.Lock()


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


def free_image(image: Image.Image) -> None:
    """Free the pixels of an image that is no longer needed.

    Pillow frees an image within one call and holds the GIL meanwhile, 20 to 40 ms for 256 MB. Here its blocks are moved
    to Pillow's pool, which costs nothing, and are freed from there one by one.
    """
    if image.width * image.height * _PIXEL_BYTES < LARGE_BYTES:
        image.close()
        return
    core: Any = vars(Image)["core"]  # the C library, which Pillow's type stubs do not list
    with _POOL:
        core.set_blocks_max(_BLOCKS_MAX)
        image.close()
        while cached := core.get_stats()["blocks_cached"]:
            core.clear_cache(cached - 1)
            time.sleep(0)  # let a thread that waits for the GIL run
        core.set_blocks_max(0)
