"""The common part of both workers of a rank: device, threads, process group, adapters, and compilation of kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from vsched.types import ModelInfo
from vsched.worker.contract import Batch, Progress, Worker, WorkerSettings
from vsched.worker.memory import DeviceMemory
from vsched_workers.adapters.layers import AdaptedModule
from vsched_workers.backends.choice import choose_backend, threads_here
from vsched_workers.backends.reference.backend import Backend
from vsched_workers.checkpoint.files import checkpoint_directory, read_json
from vsched_workers.checkpoint.whole_model import build_tower
from vsched_workers.families import FAMILIES, family_of_rank, language_family
from vsched_workers.families.decoders import text_family
from vsched_workers.families.generic import read_config
from vsched_workers.parallel.rank_group import RankGroup
from vsched_workers.quantized.layers import HEAD_FORMAT
from vsched_workers.quantized.schemes import Scheme, scheme_of


def served_adapters(adapt: Callable[..., AdaptedModule], backend: Backend) -> AdaptedModule | None:
    """Allocate memory for the configured number of adapters; return None, without preparation, if it is 0."""
    settings = backend.settings
    if not settings.adapters:
        return None
    return adapt(
        count_max=settings.adapters,
        rank_max=settings.adapter_rank_max,
        allocate=functools.partial(backend.zeros, touch=True),
        make_sums=backend.prepare_adapters(),
    )


class RankWorker(Worker):
    """A worker with a backend, in a process group."""

    def __init__(
        self,
        info: ModelInfo,
        backend: Backend,
        group: RankGroup,
        adapters: AdaptedModule | None,
        *,
        weights_bytes: int,
    ) -> None:
        """Take the adapters that requests may name; None without adapters."""
        self.weights_bytes = weights_bytes
        self.adapter_bytes = 0 if adapters is None else adapters.bytes
        self._info = info
        self._backend = backend
        self._group = group
        self._memory = group.memory(backend.memory)
        self._served = adapters

    def device_memory(self) -> DeviceMemory:
        """Return the memory of the device that the worker runs on."""
        return self._memory

    def kernels_here(self) -> Mapping[str, int]:
        """Return the compiled kernels of this process."""
        return self._backend.kernels_here()

    def threads_here(self) -> int:
        """Return the number of threads that this process computes with at present."""
        return threads_here(self._backend)

    def abort(self) -> None:
        """Fail the collectives of the group, because of a failure outside of this worker."""
        self._group.abort()

    def add_adapter(self, number: int, path: str) -> None:
        """Add an adapter, all of it or nothing.

        Raises:
            CheckpointError: When it cannot be read, or does not fit.
        """
        self._adapters.read_adapter(number, path)

    def add_trial_adapter(self, number: int) -> None:
        """Add an adapter of the highest rank to all layers."""
        self._adapters.add_trial(number)

    def remove_adapter(self, number: int) -> None:
        """Remove an adapter, if it is there."""
        self._adapters.remove_adapter(number)

    def adapted(self, batch: Batch) -> AbstractContextManager[None]:
        """Apply adapters to the rows of a step until the context ends."""
        return nullcontext() if self._served is None else self._served.rows_of(batch)

    def adapted_images(self, number: int) -> AbstractContextManager[None]:
        """Apply an adapter to all rows of images until the context ends; none for 0."""
        return nullcontext() if self._served is None else self._served.all_rows(number)

    @property
    def _adapters(self) -> AdaptedModule:
        assert self._served is not None, "settings ask for adapters before any comes"
        return self._served


def checkpoint_scheme(info: ModelInfo) -> Scheme | None:
    """Return the quantization scheme of a checkpoint; None without quantization."""
    return scheme_of(read_json(checkpoint_directory(info.path), "config.json"))


def with_checkpoint_weights(info: ModelInfo, settings: WorkerSettings) -> WorkerSettings:
    """Return settings that quantize the unquantized weights of a converted GGUF file, unless a format was chosen.

    They are the embedding and the head, and layers in 16 bits.
    """
    scheme = checkpoint_scheme(info)
    if settings.quantizes or scheme is None or scheme.method != "gguf":
        return settings
    return replace(settings, weights=HEAD_FORMAT)


def compile_language(
    info: ModelInfo, settings: WorkerSettings, backend: Backend, progress: Progress
) -> int:
    """Compile the kernels of a language model; return the number of kernels that were not cached yet."""
    family: Any = language_family(info.family, info.path, settings)
    if family is None:
        config = read_config(checkpoint_directory(info.path), info.family).get_text_config()
        family = text_family(config.model_type, config, mixtures=backend.fuses_mixtures)
    else:
        config = family.model_config(info.path).get_text_config()
    scheme = checkpoint_scheme(info)
    kinds = [] if scheme is None else scheme.kinds
    return backend.compile_language(
        config, None if family is None else family.decoder, kinds, progress
    )


def compile_kernels(
    info: ModelInfo, settings: WorkerSettings, progress: Progress, *, stage: str
) -> int:
    """Compile the kernels of a stage's ranks; see `vsched.checkpoint_tools.CheckpointTools`."""
    dtype: torch.dtype = getattr(torch, info.dtype)
    if stage == "generate":
        settings = with_checkpoint_weights(info, settings)
        backend = choose_backend(settings, dtype, info.kv_dtype)
        return compile_language(info, settings, backend, progress)
    if info.family in FAMILIES:
        family = family_of_rank(info.family, info.path, settings)
        with torch.device("meta"):
            tower = family.build_vision(info.path, "sdpa")
    else:
        tower = build_tower(info.path, info.family)
    return choose_backend(settings, dtype).compile_tower(tower, progress)
