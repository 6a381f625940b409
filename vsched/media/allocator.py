"""Make the C library give back what images took, and keep nobody waiting for that.

Images of all sizes fragment the heaps of the threads: after 320 of them two threads kept 300 MB that no budget knew
of. Trimming takes that to 10 MB. Having every large allocation mapped by itself (`M_MMAP_THRESHOLD`) would keep it
there at all times, but took 45 % longer, for the pages of every image are faulted in anew. So only the blocks of very
large images are mapped: trimming 256 MB of heap locked everybody out of it for 30 to 60 ms.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

from PIL import Image

LARGE_BYTES = 8 << 20
"""Pillow keeps the pixels of an image in blocks of 16 MiB."""
_M_MMAP_THRESHOLD = -3
_PIXEL_BYTES = 4
_BLOCKS_MAX = 1 << 10
_POOL = threading.Lock()


def map_large_blocks() -> None:
    """Have large allocations of this process mapped by themselves; does nothing where the C library is not glibc."""
    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
    except (OSError, AttributeError):
        return


def return_freed_memory() -> None:
    """Give the free pages of this process's heaps back to the system; does nothing where the C library is not glibc.

    Blocks: some milliseconds; call it off the event loop.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return
    trim(0)


def free_image(image: Image.Image) -> None:
    """Free the pixels of an image that nobody needs any more.

    Pillow frees an image within one call and keeps the interpreter's lock, for 256 MB 20 to 40 ms. Here its blocks go
    to Pillow's pool, which costs nothing, and are freed from there one by one.
    """
    if image.width * image.height * _PIXEL_BYTES < LARGE_BYTES:
        image.close()
        return
    core: Any = vars(Image)["core"]  # the C library, which Pillow's types do not name
    with _POOL:
        core.set_blocks_max(_BLOCKS_MAX)
        image.close()
        while cached := core.get_stats()["blocks_cached"]:
            core.clear_cache(cached - 1)
            time.sleep(0)  # whoever waits for the interpreter's lock has it
        core.set_blocks_max(0)
