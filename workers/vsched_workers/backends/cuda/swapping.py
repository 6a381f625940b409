"""Swaps KV blocks between a GPU and pinned host memory, on a stream of its own.

The stream of the copies waits for what the computing stream was given before, so a copy sees what all steps wrote. The
computing stream waits for the copies, so no block is written to that is still read, and no step reads what is not back.
The host waits for nothing.

Not yet run on a GPU: the order of waits was tested with a stand-in for `torch.cuda`.
"""

from __future__ import annotations

from typing import Any

import torch

from vsched_workers.backends.cuda.copies import pinned
from vsched_workers.batching.kv_cache import KvCache
from vsched_workers.batching.swap_area import AllocateBytes, Pairs, SwapArea, runs


class CudaSwapArea(SwapArea):
    """Places in pinned memory for the blocks of a KV cache on a GPU."""

    def __init__(
        self,
        cache: KvCache,
        blocks: int,
        *,
        device: str,
        cuda: Any = torch.cuda,
        allocate: AllocateBytes = pinned,
    ) -> None:
        """Set places aside; a test puts others in the place of `torch.cuda` and of pinned memory.

        Raises:
            DeviceOutOfMemory: When the host has not as much.
        """
        super().__init__(cache, blocks, allocate=allocate)
        self._device = torch.device(device)
        self._cuda = cuda
        self._stream: Any = cuda.Stream(device=self._device)

    def copy(self, out: Pairs, back: Pairs) -> None:
        """Have blocks copied to places, then places to blocks, between what is computed before and after."""
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
