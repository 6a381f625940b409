"""The encode worker: the vision tower alone, writing embedding rows into arena pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from vsched.types import ModelInfo
from vsched.worker.contract import EncodeJob, Progress, WorkerSettings
from vsched.worker.memory import DeviceMemory
from vsched_workers.backends.base import Backend
from vsched_workers.backends.choice import choose_backend, torch_threads
from vsched_workers.batching.sliced_run import SlicedRun
from vsched_workers.checkpoint.files import checkpoint_directory
from vsched_workers.checkpoint.weights import WeightIndex, fill_module
from vsched_workers.families import FAMILIES, Family
from vsched_workers.families.qwen_image import PIXELS, grid_of
from vsched_workers.memory.out_of_memory import stage_remedy, typed_out_of_memory
from vsched_workers.parallel.rank_group import RankGroup
from vsched_workers.parallel.slicing import slice_module, sum_rows

if TYPE_CHECKING:
    from torch import nn


class VisionWorker:
    """The vision tower of one rank."""

    def __init__(
        self,
        info: ModelInfo,
        backend: Backend,
        family: Family,
        tower: nn.Module,
        weights_bytes: int,
        group: RankGroup,
    ) -> None:
        """Take the tower; the backend has prepared it."""
        self._info = info
        self._family = family
        self._tower = tower
        self._backend = backend
        self._tokens_max = backend.settings.encode_tokens_max
        self._group = group
        self._memory = group.memory(backend.memory)
        self._weights_bytes = weights_bytes
        self._sliced = SlicedRun()
        for block in tower.blocks[1:]:  # type: ignore[index] # every tower has them
            block.register_forward_pre_hook(self._sliced.layer_done)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights on the device."""
        return self._weights_bytes

    def device_memory(self) -> DeviceMemory:
        """Return the memory of the device that it runs on."""
        return self._memory

    def abort(self) -> None:
        """Fail the collectives of the group, for a failure outside of this worker."""
        self._group.abort()

    def encode(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        """Encode the jobs and write their rows; one call of the tower unless they exceed the token cap.

        Of several ranks, all have the rows in the end, and the first writes them.

        Raises:
            DeviceOutOfMemory: When the device's memory ran out; the batch may be retried in parts.
        """
        with self._group.together():
            for part in self._calls(jobs):
                self._encode(part, embeddings)

    @property
    def pauses(self) -> bool:
        """Whether it pauses between layers: only where the call of a layer returns when its work is done."""
        return self._backend.synchronous

    def begin(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        """Take the jobs, for `advance` to encode."""
        self._sliced.begin(lambda: self.encode(jobs, embeddings))

    def advance(self, layers: int) -> bool:
        """Encode `layers` more blocks, 0 for the rest; return whether that was all.

        Raises:
            DeviceOutOfMemory: As `encode`.
        """
        return self._sliced.advance(layers)

    def _calls(self, jobs: Sequence[EncodeJob]) -> Iterator[Sequence[EncodeJob]]:
        start = tokens = 0
        for index, job in enumerate(jobs):
            if self._tokens_max and index > start and tokens + job.tokens > self._tokens_max:
                yield jobs[start:index]
                start, tokens = index, 0
            tokens += job.tokens
        if start < len(jobs):
            yield jobs[start:]

    def _encode(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        with typed_out_of_memory("encoding images"), torch.inference_mode():
            pixels = self._backend.send_pixels([job.arrays[PIXELS] for job in jobs])
            grids = torch.tensor([grid_of(job.metadata) for job in jobs], dtype=torch.int64)
            rows = self._family.encode(
                self._tower, pixels.to(self._backend.dtype), grids.to(self._backend.device)
            )
            raw = rows.contiguous().cpu().view(torch.uint8).numpy()
        expected = (sum(job.tokens for job in jobs), self._info.embedding_row_bytes)
        if raw.shape != expected:
            raise ValueError(f"the encoder yields rows of shape {raw.shape}, expected {expected}")
        if self._group.rank:
            return
        start = 0
        for job in jobs:
            _write_pages(raw[start : start + job.tokens], job.pages, embeddings)
            start += job.tokens


def _write_pages(
    rows: npt.NDArray[np.uint8], pages: Sequence[int], embeddings: npt.NDArray[np.uint8]
) -> None:
    per_page = embeddings.shape[1]
    full = len(rows) // per_page
    if full:
        embeddings[list(pages[:full])] = rows[: full * per_page].reshape(
            full, per_page, rows.shape[1]
        )
    rest = len(rows) - full * per_page
    if rest:
        embeddings[pages[full], :rest] = rows[full * per_page :]


def load_encoder(info: ModelInfo, settings: WorkerSettings, progress: Progress) -> VisionWorker:
    """Load the vision tower alone.

    Raises:
        CheckpointError: When weights are missing or a file is corrupt.
    """
    torch.set_num_threads(torch_threads(settings))
    family = FAMILIES[info.family]
    index = WeightIndex.open(checkpoint_directory(info.path))
    dtype: torch.dtype = getattr(torch, info.dtype)
    backend = choose_backend(settings, dtype)
    with torch.device("meta"):
        tower = family.build_vision(info.path, "sdpa")
    sharing = family.vision_sharing
    cuts = slice_module(tower, sharing, ranks=settings.ranks, rank=settings.rank)
    loading = typed_out_of_memory("loading the vision tower", remedy=stage_remedy("encode"))
    # Holes that loading left would hide what batches need, until something else lies there.
    with loading, backend.without_holes():
        fill_module(
            tower,
            index,
            family.vision_prefixes,
            dtype=dtype,
            device=settings.device,
            label="loading the vision tower",
            progress=progress,
            cuts=cuts,
        )
    group = RankGroup(settings, "encode", backend.collectives)
    sum_rows(tower, sharing, group)
    weights_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tower.parameters())
    if backend.compiles:
        progress("compiling kernels", 1.0)
    with backend.without_holes():
        backend.prepare_tower(tower)
    return VisionWorker(info, backend, family, tower, weights_bytes, group)
