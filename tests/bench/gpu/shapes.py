"""Models of real shapes with random weights, made on the device: nothing is downloaded, and only a config written."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vsched.types import ModelInfo
from vsched.worker.contract import WorkerSettings
from vsched_workers.adapters.serving import adaptable_module
from vsched_workers.backends.choice import choose_backend
from vsched_workers.batching import paged_attention
from vsched_workers.checkpoint.weights import _make_buffers
from vsched_workers.families import FAMILIES
from vsched_workers.language import LanguageWorker, family_language
from vsched_workers.parallel.rank_group import RankGroup
from vsched_workers.vision import FamilyTower, VisionWorker

FAMILY = "qwen2_5_vl"
IMAGE_TOKEN = 151655
PATCH, MERGE = 14, 2
PATCH_VALUES = 3 * 2 * PATCH * PATCH


@dataclass(frozen=True)
class Shape:
    """The sizes of a model's two parts."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    depth: int = 32
    vision_hidden: int = 1280
    vision_inner: int = 3420
    vision_heads: int = 16

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def config(self) -> dict[str, Any]:
        """Return what `config.json` says."""
        half, first = self.head_dim // 2, self.head_dim // 8
        second = (half - first) // 2
        text = {
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": self.tied,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [first, second, half - first - second],
            },
        }
        vision = {
            "depth": self.depth,
            "hidden_size": self.vision_hidden,
            "intermediate_size": self.vision_inner,
            "num_heads": self.vision_heads,
            "out_hidden_size": self.hidden,
            "patch_size": PATCH,
            "window_size": 112,
            "fullatt_block_indexes": [at for at in (7, 15, 23, 31) if at < self.depth],
        }
        return {
            "model_type": FAMILY,
            "text_config": text,
            "vision_config": vision,
            "tie_word_embeddings": self.tied,
            "image_token_id": min(IMAGE_TOKEN, self.vocab - 1),
        }


SHAPES = {
    "3b": Shape(2048, 11008, 36, 16, 2, 151936, tied=True),
    "7b": Shape(3584, 18944, 28, 28, 4, 152064, tied=False),
    "nano": Shape(
        64,
        96,
        2,
        4,
        2,
        384,
        tied=True,
        depth=2,
        vision_hidden=32,
        vision_inner=48,
        vision_heads=2,
    ),
}


@dataclass
class Model:
    """Both workers of one model, and what their steps must at least move and compute."""

    shape: Shape
    info: ModelInfo
    language: LanguageWorker
    vision: VisionWorker
    language_linears: int
    vision_linears: int
    merger_linears: int


def make_model(name: str, folder: Path, device: str, dtype: torch.dtype) -> Model:
    """Make a model of a named shape on the device."""
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
    settings = WorkerSettings(device=device)
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
    merger = linears(tower.merger)
    counts = linears(model), linears(tower) - merger, merger
    generate, encode = (
        RankGroup(settings, stage, backend.collectives) for stage in ("generate", "encode")
    )
    runnable = family_language(
        info, family, backend, model, head, functools.partial(adaptable_module, model)
    )
    language = LanguageWorker(info, backend, runnable, generate)
    tower_bytes = sum(each.numel() * each.element_size() for each in tower.parameters())
    backend.prepare_tower(tower)
    vision = VisionWorker(info, backend, FamilyTower(family, tower, backend), tower_bytes, encode)
    return Model(shape, info, language, vision, *counts)


def _fill(module: nn.Module, device: str, dtype: torch.dtype) -> None:
    """Give a module on the meta device random weights; its norms get ones."""
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            made = torch.empty(parameter.shape, device=device, dtype=dtype)
            made = made.fill_(1.0) if parameter.dim() == 1 else made.normal_(std=0.02)
            setattr(child, name, nn.Parameter(made, requires_grad=False))
    _make_buffers(module, device)
    module.eval()


def linears(module: nn.Module) -> int:
    """Return the weights of the linear layers: each is multiplied and added once a row."""
    return sum(each.weight.numel() for each in module.modules() if isinstance(each, nn.Linear))
