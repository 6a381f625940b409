"""Copies of rows of host memory to the device that overlap with computing.

Embedding rows are scattered over the pages of the arena. Only the rows that a chunk covers are gathered into pinned
memory; from there a separate stream copies them while the device is still busy with earlier work. The computing stream
waits for the copy; the host waits only for a pinned buffer that is still being read. There are two buffers, so that one
can be filled while the other is copied.

The order of waits is tested with a stand-in for `torch.cuda`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

BUFFERS = 2


def pinned(size: int) -> torch.Tensor:
    """Allocate `size` bytes of host memory that a GPU can copy asynchronously."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


@dataclass
class _PinnedBuffer:
    """Pinned memory, and the event after which it may be overwritten."""

    memory: torch.Tensor
    copied: Any = None


class RowCopies:
    """Copies rows to one device."""

    def __init__(
        self,
        device: str,
        *,
        cuda: Any = torch.cuda,
        allocate: Callable[[int], torch.Tensor] = pinned,
    ) -> None:
        """Prepare for a device; tests replace `torch.cuda` and pinned memory."""
        self._device = torch.device(device)
        self._cuda = cuda
        self._allocate = allocate
        self._next_buffer = 0
        self._buffers = [_PinnedBuffer(allocate(0)) for _ in range(BUFFERS)]
        self._stream: Any = cuda.Stream(device=self._device)

    def fetch(self, source: npt.NDArray[np.uint8], wanted: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return the wanted rows of `source` on the device, ready for its current stream.

        Shape: source uint8 [rows, bytes], wanted int64 [n]; returns uint8 [n, bytes].

        Blocks: until the copy before the last one is done.
        """
        staged, buffer = self._stage(source, wanted)
        current = self._cuda.current_stream(self._device)
        with self._cuda.stream(self._stream):
            rows = torch.empty(staged.shape, dtype=torch.uint8, device=self._device)
            rows.copy_(staged, non_blocking=True)
            buffer.copied = self._cuda.Event()
            buffer.copied.record(self._stream)
        current.wait_event(buffer.copied)
        # The memory was allocated on the copy stream, which must not reuse it while the current stream still reads it.
        rows.record_stream(current)
        return rows

    def _stage(
        self, source: npt.NDArray[np.uint8], wanted: npt.NDArray[np.int64]
    ) -> tuple[torch.Tensor, _PinnedBuffer]:
        """Gather rows into the next pinned buffer, after its last copy."""
        buffer = self._buffers[self._next_buffer]
        self._next_buffer = (self._next_buffer + 1) % len(self._buffers)
        if buffer.copied is not None:
            buffer.copied.synchronize()
        size = len(wanted) * source.shape[1]
        if len(buffer.memory) < size:
            buffer.memory = self._allocate(size)
        staged = buffer.memory[:size].view(len(wanted), source.shape[1])
        # In any mode but "clip", numpy copies the output first. The indices are always valid.
        np.take(source, wanted, axis=0, out=staged.numpy(), mode="clip")
        return staged, buffer
