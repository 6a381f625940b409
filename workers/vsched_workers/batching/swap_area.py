"""Host memory for KV blocks of preempted requests, and the copies to it and back.

A place holds a block: its keys and values of every layer, for each of them beside those of the other places. Copies go
layer by layer, and within one over runs of places in a row: blocks may lie anywhere, and no memory is taken between.

On a CPU the host's memory is what the KV cache is in, too; the places are a mapping of their own all the same. It is a
shared one, which the limit on the process does not count: as with the arena, it is the host that must have it. The host
gives its pages when they are written to first.
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
"""Copies, [copies, 2]: from where, and to where."""

SWAP_REMEDY = "lower generate.swap_memory"

AllocateBytes = Callable[[int], torch.Tensor]
"""Allocates so many bytes of host memory, uint8."""

RUN_MAX = 64
"""Blocks of a run at most: on a device, a run of one layer is gathered first."""


def shared_pages(size: int) -> torch.Tensor:
    """Return `size` bytes of host memory that no limit on the process counts."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


class SwapArea:
    """Places for blocks of one KV cache, in the memory that the cache is in."""

    def __init__(
        self, cache: KvCache, blocks: int, *, allocate: AllocateBytes = shared_pages
    ) -> None:
        """Set places for `blocks` blocks aside.

        Raises:
            DeviceOutOfMemory: When the host has not as much.
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
    """Yield runs of places: the first place, and the blocks that go with them, int64; `pairs` has the places first."""
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
