"""Compilation of a model's kernels before it is loaded, from the checkpoint's configuration alone."""

from __future__ import annotations

from typing import Any

import torch

from vsched.types import ModelInfo
from vsched.worker.contract import Progress, WorkerSettings
from vsched_workers.backends.choice import choose_backend
from vsched_workers.backends.reference.backend import Backend
from vsched_workers.checkpoint.files import checkpoint_directory, read_json
from vsched_workers.families import FAMILIES, family_of_rank, language_family
from vsched_workers.families.decoders import text_family
from vsched_workers.families.generic import read_config
from vsched_workers.quantized.schemes import scheme_of


def compile_language(
    info: ModelInfo, settings: WorkerSettings, backend: Backend, progress: Progress
) -> int:
    """Compile the kernels of a language model; return the number of kernels that were not cached yet."""
    family: Any = language_family(info.family, info.path, settings)
    if family is None:
        config = read_config(checkpoint_directory(info.path), info.family).get_text_config()
        family = text_family(config.model_type, config)
    else:
        config = family.model_config(info.path).get_text_config()
    scheme = scheme_of(read_json(checkpoint_directory(info.path), "config.json"))
    kinds = [scheme.kind] if scheme is not None and scheme.kind else []
    return backend.compile_language(
        config, None if family is None else family.decoder, kinds, progress
    )


def compile_kernels(
    info: ModelInfo, settings: WorkerSettings, progress: Progress, *, stage: str
) -> int:
    """Compile the kernels of a stage's ranks; see `vsched.checkpoint_tools.CheckpointTools`."""
    dtype: torch.dtype = getattr(torch, info.dtype)
    if stage == "generate":
        backend = choose_backend(settings, dtype, info.kv_dtype)
        return compile_language(info, settings, backend, progress)
    tower = None
    if info.family in FAMILIES:
        family = family_of_rank(info.family, info.path, settings)
        with torch.device("meta"):
            tower = family.build_vision(info.path, "sdpa")
    return choose_backend(settings, dtype).compile_tower(tower, progress)
