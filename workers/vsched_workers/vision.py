"""The encode worker: the vision tower alone, which writes embedding rows into arena pages."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from vsched.types import ModelInfo
from vsched.worker.contract import EncodeJob, EncodeWorker, Progress, WorkerSettings
from vsched_workers.adapters.layers import AdaptedModule
from vsched_workers.backends.choice import choose_backend, torch_threads
from vsched_workers.backends.reference.any_tower import AnyTower, leave_out_layers
from vsched_workers.backends.reference.backend import Backend
from vsched_workers.checkpoint.files import checkpoint_directory, read_json
from vsched_workers.checkpoint.quantized_parts import check_unquantized
from vsched_workers.checkpoint.weights import WeightIndex, fill_module
from vsched_workers.checkpoint.whole_model import build_tower, load_whole
from vsched_workers.device_copies import fetched
from vsched_workers.families import FAMILIES, Family, family_of_rank
from vsched_workers.families.qwen_image import flat_patches, grid_of
from vsched_workers.families.qwen_levels import pixel_values
from vsched_workers.memory.out_of_memory import stage_remedy, typed_out_of_memory
from vsched_workers.parallel.rank_group import RankGroup
from vsched_workers.parallel.slicing import Cut, slice_module, sum_rows
from vsched_workers.quantized.layers import check_groups
from vsched_workers.rank_worker import RankWorker, checkpoint_scheme, served_adapters

if TYPE_CHECKING:
    from torch import nn

    from vsched_workers.batching.sliced_run import SlicedRun


class FamilyTower:
    """The tower of a supported family: all images in one call.

    Attributes:
        batches: Whether it takes several images per call.
        module: The module that contains its layers.
        layers: Layers or blocks that run in sequence and take about the same time each, as far as known.
    """

    batches = True

    def __init__(self, family: Family, module: Any, backend: Backend, temporal: int) -> None:
        """Take the module, which the backend has prepared, and its temporal patch size."""
        self._family, self._backend = family, backend
        self._temporal = temporal
        self.module: nn.Module = module
        self.layers: Sequence[nn.Module] = list(module.blocks)
        leave_out_layers(self.layers)

    def encode(self, jobs: Sequence[EncodeJob]) -> torch.Tensor:
        """Return the embedding rows of all jobs, concatenated, [tokens, levels * hidden], on any device."""
        images = [job.arrays for job in jobs]
        pixels = self._backend.send_pixels([flat_patches(arrays) for arrays in images])
        values = pixel_values(pixels, images, self._backend.dtype, temporal=self._temporal)
        grids = torch.tensor([grid_of(job.metadata) for job in jobs], dtype=torch.int64)
        return self._family.encode(self.module, values, grids)


class VisionWorker(RankWorker, EncodeWorker):
    """The vision tower of one rank."""

    def __init__(
        self,
        info: ModelInfo,
        backend: Backend,
        tower: FamilyTower | AnyTower,
        weights_bytes: int,
        group: RankGroup,
        adapters: AdaptedModule | None = None,
    ) -> None:
        """Take the tower, which the backend has prepared; `adapters` are the adapters that images may name, or None."""
        super().__init__(info, backend, group, adapters, weights_bytes=weights_bytes)
        # Only if a layer's call returns after its work is done.
        self.pauses = backend.synchronous and len(tower.layers) > 1
        self._tower = tower
        self._sliced: SlicedRun | None = None
        self._batches = 0
        if self.pauses:
            from vsched_workers.batching.sliced_run import SlicedRun  # requires greenlet

            self._sliced = SlicedRun()
            for layer in tower.layers[1:]:
                layer.register_forward_pre_hook(self._sliced.layer_done)

    @property
    def module(self) -> nn.Module:
        """The module that contains its layers."""
        return self._tower.module

    def encode(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        """Encode the jobs and write their embedding rows.

        Towers that batch images get them in one call. Images of different adapters are in different calls: an image has
        too many rows to gain by sharing one. All ranks compute all rows, and rank 0 writes them.

        Raises:
            DeviceOutOfMemory: When the device's memory ran out; the batch may be retried in parts.
        """
        with self._backend.computing("encode", sum(job.tokens for job in jobs)):
            self._encode_all(jobs, embeddings)

    def _encode_all(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        with self._group.together():
            for part in self._calls(jobs):
                self._encode(part, embeddings)

    def sparsely(self) -> AbstractContextManager[None]:
        """Run only a part of each batch's work, with its full memory, until the context ends."""
        return self._backend.sparsely()

    def begin(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        """Start encoding jobs; `advance` does the work."""
        assert self._sliced is not None, "`pauses` says so"
        self._batches += 1
        self._sliced.set_work(lambda: self._encode_all(jobs, embeddings))

    def advance(self, layers: int) -> bool:
        """Encode `layers` more layers, or the rest if 0; return whether the batch is complete.

        Raises:
            DeviceOutOfMemory: As `encode`.
        """
        assert self._sliced is not None, "`pauses` says so"
        with self._backend.computing("encode", layers, kind=self._batches):
            return self._sliced.advance(layers)

    def _calls(self, jobs: Sequence[EncodeJob]) -> Iterator[Sequence[EncodeJob]]:
        adapter = attrgetter("adapter")
        for _, alike in groupby(sorted(jobs, key=adapter), key=adapter):
            if self._tower.batches:
                yield [*alike]
            else:
                yield from ([job] for job in alike)

    def _encode(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        with typed_out_of_memory("encoding images"), torch.inference_mode():
            with self.adapted_images(jobs[0].adapter):
                rows = self._tower.encode(jobs)
            raw = fetched(rows.contiguous()).view(torch.uint8).numpy()
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
    load = _load_family if info.family in FAMILIES else _load_any
    with typed_out_of_memory("loading the vision tower", remedy=stage_remedy("encode")):
        return load(info, settings, progress)


def check_vision_share(info: ModelInfo, settings: WorkerSettings) -> None:
    """Raise a `ConfigError` if a rank cannot quantize its share of the vision tower."""
    if info.family in FAMILIES:
        _build_share(info, settings)


def _build_share(
    info: ModelInfo, settings: WorkerSettings
) -> tuple[Family, nn.Module, dict[str, Cut]]:
    """Build a rank's share of a tower on the meta device; return its family and the cuts by name, too."""
    family = family_of_rank(info.family, info.path, settings)
    with torch.device("meta"):
        tower = family.build_vision(info.path, "sdpa")
    cuts = slice_module(tower, family.vision_sharing, ranks=settings.ranks, rank=settings.rank)
    check_groups(cuts, settings, stage="encode")
    return family, tower, cuts


def _load_family(info: ModelInfo, settings: WorkerSettings, progress: Progress) -> VisionWorker:
    family, tower, cuts = _build_share(info, settings)
    index = WeightIndex.open(checkpoint_directory(info.path))
    dtype: torch.dtype = getattr(torch, info.dtype)
    backend = choose_backend(settings, dtype)
    backend.compile_tower(tower, progress)
    # Holes in the heap from loading would hide the memory that batches need, until they are filled.
    with backend.without_holes():
        fill_module(
            tower,
            index,
            family.vision_prefixes,
            dtype=dtype,
            device=settings.device,
            label="loading the vision tower",
            progress=progress,
            cuts=cuts,
            mapped=backend.lays_out(tower),
        )
    group = RankGroup(settings, "encode", backend.collectives)
    sum_rows(tower, family.vision_sharing, group)
    if backend.compiles:
        progress("loading kernels", 1.0)
    with backend.without_holes():
        weights_bytes = backend.prepare_tower(tower)
        adapters = served_adapters(
            functools.partial(
                AdaptedModule,
                tower,
                cuts=cuts,
                prefixes=family.vision_prefixes,
                others=family.language_prefixes,
            ),
            backend,
        )
    config = read_json(checkpoint_directory(info.path), "config.json")
    temporal = int(family.vision(config, "temporal_patch_size"))
    made = FamilyTower(family, tower, backend, temporal)
    return VisionWorker(info, backend, made, weights_bytes, group, adapters)


def _load_any(info: ModelInfo, settings: WorkerSettings, progress: Progress) -> VisionWorker:
    """Load a vision tower on the generic path."""
    assert settings.ranks == 1, "such a tower is not shared"
    dtype: torch.dtype = getattr(torch, info.dtype)
    backend = choose_backend(settings, dtype)
    model = build_tower(info.path, info.family)
    scheme = checkpoint_scheme(info)
    if scheme is not None:
        check_unquantized(model, WeightIndex.open(checkpoint_directory(info.path)), scheme)
    backend.compile_tower(model, progress)
    with backend.without_holes():
        model = load_whole(
            model,
            info.path,
            dtype=dtype,
            device=settings.device,
            progress=progress,
            label="loading the vision tower",
            mapped=backend.lays_out,
        )
        if backend.compiles:
            progress("loading kernels", 1.0)
        weights_bytes = backend.prepare_any_tower(model)
        adapters = served_adapters(
            functools.partial(AdaptedModule, model),
            backend,
        )
    group = RankGroup(settings, "encode", backend.collectives)
    tower = AnyTower(model, dtype, settings.device)
    return VisionWorker(info, backend, tower, weights_bytes, group, adapters)
