"""Models of real shapes with random weights, created on the device: no download, and only a config file."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.bench.gpu.costs import FAMILY, SHAPES, Shape
from vsched.types import ModelInfo
from vsched.worker.contract import WorkerSettings
from vsched_workers.adapters.layers import AdaptedModule
from vsched_workers.backends.choice import choose_backend
from vsched_workers.batching import paged_attention
from vsched_workers.checkpoint.weights import _make_buffers
from vsched_workers.families import FAMILIES
from vsched_workers.language import LanguageWorker, family_language
from vsched_workers.parallel.rank_group import RankGroup
from vsched_workers.vision import FamilyTower, VisionWorker


@dataclass
class Model:
    """Both workers of one model, and the shape for the lower bounds of its steps."""

    shape: Shape
    info: ModelInfo
    language: LanguageWorker
    vision: VisionWorker


def make_model(
    name: str, folder: Path, device: str, dtype: torch.dtype, *, weights: str = "auto"
) -> Model:
    """Create a model of a named shape on the device, with quantized weights if `weights` says so."""
    shape = SHAPES[name]
    (folder / "config.json").write_text(json.dumps(shape.config()))
    family, path = FAMILIES[FAMILY], str(folder)
    info = ModelInfo(
        family=FAMILY,
        path=path,
        dtype=str(dtype).removeprefix("torch."),
        hidden_size=shape.hidden,
        embedding_levels=1,
        vocab_size=shape.vocab,
        context_tokens=128000,
        kv_bytes_per_token=2 * shape.layers * shape.kv_heads * shape.head_dim * dtype.itemsize,
        item_tokens_max=16384,
        image_token_id=shape.config()["image_token_id"],
        stop_token_ids=(),
    )
    settings = WorkerSettings(device=device, weights=weights)
    backend = choose_backend(settings, dtype)
    backend.load_attention()
    paged_attention.register()
    with torch.device("meta"):
        model: Any = family.build_language(path, paged_attention.NAME)
        tower: Any = family.build_vision(path, "sdpa")
    for module in (model, tower):
        _fill(module, device, dtype)
    head = model.embed_tokens.weight
    if not shape.tied:
        head = torch.randn(shape.vocab, shape.hidden, device=device, dtype=dtype) * 0.02
    generate, encode = (
        RankGroup(settings, stage, backend.collectives) for stage in ("generate", "encode")
    )
    runnable = family_language(
        info, family, backend, model, head, functools.partial(AdaptedModule, model)
    )
    language = LanguageWorker(info, backend, runnable, generate)
    tower_bytes = sum(each.numel() * each.element_size() for each in tower.parameters())
    backend.prepare_tower(tower)
    vision = VisionWorker(
        info, backend, FamilyTower(family, tower, backend, temporal=2), tower_bytes, encode
    )
    return Model(shape, info, language, vision)


def _fill(module: nn.Module, device: str, dtype: torch.dtype) -> None:
    """Give a module on the meta device random weights, and ones in its norms."""
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            made = torch.empty(parameter.shape, device=device, dtype=dtype)
            made = made.fill_(1.0) if parameter.dim() == 1 else made.normal_(std=0.02)
            setattr(child, name, nn.Parameter(made, requires_grad=False))
    _make_buffers(module, device)
    module.eval()
