"""Random LoRA adapters without PEFT, for tests that compare two implementations in vsched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModel

from tests.workers.driver import Stage
from vsched_workers.adapters.files import Adapter, LowRankPair


def random_adapter(
    config: Any, *, rank: int, seed: int, only: Sequence[str] = (), prefix: str = "model."
) -> Adapter:
    """Return an adapter that changes a language model's linear layers, or only those named in `only`.

    `config` is the model's transformers configuration. In the whole model, layer names begin with `prefix`.
    """
    with torch.device("meta"):
        model: Any = AutoModel.from_config(config)
    chance = torch.Generator().manual_seed(seed)
    pairs = {}
    for name, layer in model.named_modules():
        wanted = not only or name.rpartition(".")[2] in only
        if isinstance(layer, nn.Linear) and wanted:
            down = torch.randn(rank, layer.in_features, generator=chance)
            up = torch.randn(layer.out_features, rank, generator=chance)
            size = 0.3 * (layer.in_features * rank) ** -0.5
            pairs[f"{prefix}{name}"] = LowRankPair(down, up * size, 2.0)
    return Adapter(pairs)


def add_adapters(stage: Stage, adapters: Sequence[Adapter]) -> None:
    """Add adapters to a language model, numbered from 1; it was loaded with space for them."""
    worker: Any = stage.generator
    for number, adapter in enumerate(adapters, start=1):
        worker._served.add_adapter(number, adapter)
