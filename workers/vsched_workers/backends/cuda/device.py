"""A GPU's memory and streams: copies to it, swapping of KV blocks, collectives, and optional parts of the backend.

Embedding rows are scattered over the pages of the arena. Only the rows that a chunk covers are gathered into pinned
memory; from there a separate stream copies them while the device is still busy with earlier work. The computing stream
waits for the copy; the host waits only for a pinned buffer that is still being read. There are two buffers, so that one
can be filled while the other is copied.

KV blocks are swapped to pinned host memory on a separate stream. It waits for earlier work on the computing stream, so
a copy sees the writes of all steps. The computing stream waits for the copies, so no block is overwritten while it is
read, and no step reads a block that is not restored. The host does not wait.

The order of waits is tested with a stand-in for `torch.cuda`. Communication between ranks (NCCL) has not yet run on
several GPUs.

A part of the backend that fails its trial is left out with a warning. An environment variable turns off parts for the
rest: with one part off at a time, the part that computes wrong results is found. `generate.attention = "exact"` turns
off the attention kernels.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed

from vsched.errors import ConfigError
from vsched_workers.batching.kv_cache import KvCache, Pairs, SwapArea, runs
from vsched_workers.device_copies import sent
from vsched_workers.memory.out_of_memory import typed_out_of_memory

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

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._next_buffer = 0
        self._buffers = [_PinnedBuffer(pinned(0)) for _ in range(BUFFERS)]
        self._stream: Any = torch.cuda.Stream(device=self._device)

    def fetch(self, source: npt.NDArray[np.uint8], wanted: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return the wanted rows of `source` on the device, ready for its current stream.

        Shape: source uint8 [rows, bytes], wanted int64 [n]; returns uint8 [n, bytes].

        Blocks: until the copy before the last one is done.
        """
        staged, buffer = self._stage(source, wanted)
        current: Any = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            rows = torch.empty(staged.shape, dtype=torch.uint8, device=self._device)
            rows.copy_(staged, non_blocking=True)
            buffer.copied = torch.cuda.Event()
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
            buffer.memory = pinned(size)
        staged = buffer.memory[:size].view(len(wanted), source.shape[1])
        # In any mode but "clip", numpy copies the output first. The indices are always valid.
        np.take(source, wanted, axis=0, out=staged.numpy(), mode="clip")
        return staged, buffer


class CudaSwapArea(SwapArea):
    """Pinned host memory for swapped blocks of a KV cache on a GPU."""

    def __init__(self, cache: KvCache, blocks: int, *, device: str) -> None:
        """Allocate the memory.

        Raises:
            DeviceOutOfMemory: When the host has too little memory.
        """
        super().__init__(cache, blocks)
        self._device = torch.device(device)
        self._stream: Any = torch.cuda.Stream(device=self._device)
        # Torch's allocator of pinned memory would take the next power of two, of gigabytes.
        whole, cudart = self._places[0].untyped_storage(), torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(whole.data_ptr(), whole.nbytes(), 0))
        weakref.finalize(self, _unpin, self._stream, cudart, whole.data_ptr()).atexit = False

    def copy(self, out: Pairs, back: Pairs) -> None:
        """Enqueue copies of blocks to the host, then of blocks to the device, between earlier and later computation."""
        current: Any = torch.cuda.current_stream(self._device)
        written: Any = torch.cuda.Event()
        written.record(current)
        self._stream.wait_event(written)
        with torch.cuda.stream(self._stream):
            for place, blocks in runs(out[:, ::-1]):
                chosen = sent(blocks.numpy(), self._device)
                for part, places in zip(self._parts, self._places, strict=True):
                    found = part.index_select(0, chosen)
                    places[place : place + len(blocks)].copy_(found, non_blocking=True)
            for place, blocks in runs(back):
                chosen = sent(blocks.numpy(), self._device)
                for part, places in zip(self._parts, self._places, strict=True):
                    kept = places[place : place + len(blocks)]
                    part.index_copy_(0, chosen, kept.to(self._device, non_blocking=True))
            copied: Any = torch.cuda.Event()
            copied.record(self._stream)
        current.wait_event(copied)


def _unpin(stream: Any, cudart: Any, address: int) -> None:
    stream.synchronize()
    cudart.cudaHostUnregister(address)


class CudaMemory:
    """The memory of a CUDA device."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._device = torch.device(name)

    @property
    def pool(self) -> str:
        return f"cuda:GPU-{torch.cuda.get_device_properties(self._device).uuid}"

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def available(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def reserved(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))

    def allocated(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def peak(self) -> int:
        return int(torch.cuda.max_memory_reserved(self._device))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def drift(self, growth_bytes: int) -> int:
        return 0  # the allocator keeps its peak for this process

    def release(self) -> None:
        torch.cuda.synchronize(self._device)
        # cuBLAS takes workspaces of 32 MiB a stream from torch's allocator; captured graphs, which use theirs, are
        # dropped before.
        torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001
        torch.cuda.empty_cache()

    def settle(self) -> None:
        """Keep the allocator's cache: another process could take freed memory."""

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Allocate `size` bytes; once freed, the allocator keeps them for this process until `release`."""
        with typed_out_of_memory("holding memory back"):
            held = torch.empty(size, dtype=torch.uint8, device=self._device)
        try:
            yield
        finally:
            del held


_DISTRIBUTED: Any = torch.distributed


class NcclCollectives:
    """See `Collectives`. A closed connection does not wake peers: each rank has to abort its own group."""

    exchanges = False
    wakes_peers = False

    def connect(self, store: Any, rank: int, size: int, *, timeout_s: float) -> Any:
        nccl = _DISTRIBUTED.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001
        return nccl(store, rank, size, options)


VARIABLE = "VSCHED_CUDA_OFF"
PARTS = ("graphs", "layers", "tower", "triton")
"""Captured decode steps, fused layers of language models and of vision towers, and whatever needs Triton."""


def parts_off() -> frozenset[str]:
    """Return the parts that are turned off, separated by commas in the variable.

    Raises:
        ConfigError: When there is no such part.
    """
    names = os.environ.get(VARIABLE, "")
    found = frozenset(name.strip() for name in names.split(",") if name.strip())
    unknown = sorted(found - set(PARTS))
    if unknown:
        raise ConfigError(
            f"{VARIABLE}: unknown part {unknown[0]!r}. Known: {', '.join(PARTS)}, separated by commas. "
            "Remedy: correct it, or unset it."
        )
    return found


def has_triton() -> bool:
    """Return whether Triton is installed, and not turned off."""
    return "triton" not in parts_off() and find_spec("triton") is not None
