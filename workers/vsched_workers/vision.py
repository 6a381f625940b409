"""The encode worker: the vision tower alone, writing embedding rows into arena pages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vsched.types import ModelInfo
from vsched.worker.contract import EncodeJob, Progress, WorkerSettings
from vsched.worker.memory import DeviceMemory
from vsched_workers.memory.device_memory import open_device_memory, typed_out_of_memory

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vsched_workers.families import Family
    from vsched_workers.parallel.rank_group import RankGroup


class VisionWorker:
    """The vision tower of one rank."""

    def __init__(
        self,
        info: ModelInfo,
        settings: WorkerSettings,
        family: Family,
        tower: nn.Module,
        weights_bytes: int,
        group: RankGroup,
    ) -> None:
        import torch

        from vsched_workers.batching.pausing import PausingRun

        self._info = info
        self._family = family
        self._tower = tower
        self._device = settings.device
        self._dtype: torch.dtype = getattr(torch, info.dtype)
        self._tokens_max = settings.encode_tokens_max
        self._group = group
        self._memory = group.memory(open_device_memory(settings.device))
        self._weights_bytes = weights_bytes
        self._pausing = PausingRun()
        for block in tower.blocks[1:]:  # type: ignore[index] # every tower has them
            block.register_forward_pre_hook(self._pausing.part_done)

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
        """On a GPU it does not pause yet: how long a part takes there is not known when its launches are done."""
        return self._device == "cpu"

    def begin(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        """Take the jobs, for `advance` to encode."""
        self._pausing.begin(lambda: self.encode(jobs, embeddings))

    def advance(self, layers: int) -> bool:
        """Encode so many blocks more, 0 for the rest; return whether that was all.

        Raises:
            DeviceOutOfMemory: As `encode`.
        """
        return self._pausing.advance(layers)

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
        import torch

        with typed_out_of_memory("encoding images"), torch.inference_mode():
            # The copy also gives torch memory that it may call its own: the arena's view is read-only.
            pixels = self._gather([job.pixels for job in jobs])
            grids = torch.tensor([job.grid for job in jobs], dtype=torch.int64)
            rows = self._family.encode(
                self._tower,
                pixels.to(device=self._device, non_blocking=True).to(self._dtype),
                grids.to(self._device),
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

    def _gather(self, parts: Sequence[npt.NDArray[np.float32]]) -> torch.Tensor:
        """Put the pixels of all images together, in pinned memory where they go to a GPU."""
        import torch

        if self._device == "cpu":
            return torch.from_numpy(np.concatenate(parts))
        shape = (sum(len(part) for part in parts), parts[0].shape[1])
        pixels = torch.empty(shape, dtype=torch.float32, pin_memory=True)
        np.concatenate(parts, out=pixels.numpy())
        return pixels


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
    import torch

    from vsched_workers.backends.cpu.modules import (
        MANY_ROWS,
        flatten_patches,
        pack_linears,
        packs,
        warm_up,
    )
    from vsched_workers.backends.cuda import vision_attention
    from vsched_workers.backends.kernel_choice import choose_products
    from vsched_workers.checkpoint.facts import checkpoint_directory
    from vsched_workers.checkpoint.weights import WeightIndex, fill_module
    from vsched_workers.families import FAMILIES
    from vsched_workers.parallel.rank_group import RankGroup
    from vsched_workers.parallel.slicing import slice_module, sum_rows

    torch.set_num_threads(settings.threads)
    family = FAMILIES[info.family]
    index = WeightIndex.open(checkpoint_directory(info.path))
    with torch.device("meta"):
        tower = family.build_vision(info.path, vision_attention.PLAIN)
    vision_attention.use(
        tower, vision_attention.choose_attention(settings, getattr(torch, info.dtype))
    )
    sharing = family.vision_sharing
    cuts = slice_module(tower, sharing, ranks=settings.ranks, rank=settings.rank)
    with typed_out_of_memory("loading the vision tower"):
        fill_module(
            tower,
            index,
            family.vision_prefixes,
            dtype=getattr(torch, info.dtype),
            device=settings.device,
            label="loading the vision tower",
            progress=progress,
            cuts=cuts,
        )
    group = RankGroup(settings, "encode")
    sum_rows(tower, sharing, group)
    weights_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tower.parameters())
    packing = packs(settings.device, getattr(torch, info.dtype))
    make_own = choose_products(settings) if packing else None
    if settings.device == "cpu":
        flatten_patches(tower, make_own)
    if packing:
        progress("compiling kernels", 1.0)
        pack_linears(tower, MANY_ROWS, make_own)
        warm_up(tower)
        if settings.attention != "exact":
            with contextlib.suppress(ImportError):  # nothing compiles the kernels here
                from vsched_workers.backends.cpu.vision_blocks import fuse_blocks

                fuse_blocks(tower, settings.threads)
    return VisionWorker(info, settings, family, tower, weights_bytes, group)
