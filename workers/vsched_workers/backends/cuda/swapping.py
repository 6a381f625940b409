"""Swapping of KV blocks between a GPU and pinned host memory, on a separate stream.

The copy stream waits for earlier work on the computing stream, so a copy sees the writes of all steps. The computing
stream waits for the copies, so no block is overwritten while it is read, and no step reads a block that is not
restored. The host does not wait.

The order of waits is tested with a stand-in for `torch.cuda`.
"""

from __future__ import annotations

from typing import Any

import torch

from vsched_workers.backends.cuda.copies import pinned
from vsched_workers.batching.kv_cache import KvCache
from vsched_workers.batching.swap_area import AllocateBytes, Pairs, SwapArea, runs


class CudaSwapArea(SwapArea):
    """Pinned host memory for swapped blocks of a KV cache on a GPU."""

    def __init__(
        self,
        cache: KvCache,
        blocks: int,
        *,
        device: str,
        cuda: Any = torch.cuda,
        allocate: AllocateBytes = pinned,
    ) -> None:
        """Allocate the memory; tests replace `torch.cuda` and pinned memory.

        Raises:
            DeviceOutOfMemory: When the host has too little memory.
        """
        super().__init__(cache, blocks, allocate=allocate)
        self._device = torch.device(device)
        self._cuda = cuda
        self._stream: Any = cuda.Stream(device=self._device)

    def copy(self, out: Pairs, back: Pairs) -> None:
        """Enqueue copies of blocks to the host, then of blocks to the device, between earlier and later computation."""
        current = self._cuda.current_stream(self._device)
        written = self._cuda.Event()
        written.record(current)
        self._stream.wait_event(written)
        with self._cuda.stream(self._stream):
            for place, blocks in runs(out[:, ::-1]):
                chosen = blocks.to(self._device)
                for part, places in zip(self._parts, self._places, strict=True):
                    found = part.index_select(0, chosen)
                    places[place : place + len(blocks)].copy_(found, non_blocking=True)
            for place, blocks in runs(back):
                chosen = blocks.to(self._device)
                for part, places in zip(self._parts, self._places, strict=True):
                    kept = places[place : place + len(blocks)]
                    part.index_copy_(0, chosen, kept.to(self._device, non_blocking=True))
            copied = self._cuda.Event()
            copied.record(self._stream)
        current.wait_event(copied)
