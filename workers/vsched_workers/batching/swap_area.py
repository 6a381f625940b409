"""Swap space: host memory for KV blocks of preempted requests, and the copies to it and back.

A place holds the keys and values of one block in every layer, stored layer by layer. Copies go layer by layer, over
runs of consecutive places: blocks may lie anywhere, and no temporary memory is needed.

On a CPU the KV cache is in host memory, too, but the swap space is still a separate mapping. It is shared memory, which
the limit on the process does not count: as for the arena, the host must have it. The host backs its pages on first
write.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from vsched.errors import DeviceOutOfMemory, limit_message
from vsched.worker.memory import host_available
from vsched_workers.batching.kv_cache import KvCache

Pairs = npt.NDArray[np.int32]
"""Copies, [copies, 2]: source and target."""

SWAP_REMEDY = "lower generate.swap_memory"

AllocateBytes = Callable[[int], torch.Tensor]
"""Allocates bytes of host memory, uint8."""

RUN_MAX = 64
"""The largest number of blocks in a run: on a device, a run of one layer is gathered first."""


def shared_pages(size: int) -> torch.Tensor:
    """Return `size` bytes of host memory that no limit on the process counts."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


class SwapArea:
    """Swap space for blocks of one KV cache, in the kind of memory that the cache is in."""

    def __init__(
        self, cache: KvCache, blocks: int, *, allocate: AllocateBytes = shared_pages
    ) -> None:
        """Allocate space for `blocks` blocks.

        Raises:
            DeviceOutOfMemory: When the host has too little memory.
        """
        size = cache.block_size
        self._parts = [
            part.view(len(part) // size, -1) for part in (*cache.keys, *cache.values) if len(part)
        ]
        widths = [part.shape[1] for part in self._parts]
        dtype = self._parts[0].dtype
        _require_host(blocks * sum(widths) * dtype.itemsize)
        whole = allocate(blocks * sum(widths) * dtype.itemsize).view(dtype)
        pieces = whole.split([blocks * width for width in widths])
        self._places = [
            piece.view(blocks, width) for piece, width in zip(pieces, widths, strict=True)
        ]

    def copy(self, out: Pairs, back: Pairs) -> None:
        """Copy blocks to places, then places to blocks."""
        for place, blocks in runs(out[:, ::-1]):
            for part, places in zip(self._parts, self._places, strict=True):
                torch.index_select(part, 0, blocks, out=places[place : place + len(blocks)])
        for place, blocks in runs(back):
            for part, places in zip(self._parts, self._places, strict=True):
                part.index_copy_(0, blocks, places[place : place + len(blocks)])


def runs(pairs: Pairs) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield runs of places: the first place, and the corresponding blocks, int64; `pairs` has the places first."""
    if not len(pairs):
        return
    ordered = pairs[np.argsort(pairs[:, 0], kind="stable")]
    breaks = np.flatnonzero(np.diff(ordered[:, 0]) != 1) + 1
    for run in np.split(ordered, breaks):
        for first in range(0, len(run), RUN_MAX):
            piece = run[first : first + RUN_MAX]
            yield int(piece[0, 0]), torch.from_numpy(piece[:, 1].astype(np.int64))


def _require_host(size: int) -> None:
    available = host_available()
    if size > available:
        raise DeviceOutOfMemory(
            limit_message(
                "generate.swap_memory: the host has less free",
                value=f"{size} bytes a rank",
                limit=f"{available} bytes",
                remedy=SWAP_REMEDY,
            )
        )
