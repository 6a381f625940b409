"""Fused vision towers with the common encoder architecture against transformers' modules, in bfloat16 on the CPU."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from tests.parity.vision_architectures import VISION_ARCHITECTURES, images_of, save_model
from tests.workers.backends.cpu.twins import WITHIN
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.choice import choose_backend
from vsched_workers.backends.cpu.products import make_product
from vsched_workers.backends.cpu.vision_layers import (
    FusedEncoderLayer,
    fuse_encoders,
    merge_encoders,
)
from vsched_workers.backends.reference.any_tower import AnyTower
from vsched_workers.backends.reference.backend import Backend
from vsched_workers.backends.reference.packed_weights import pack_linears
from vsched_workers.checkpoint.whole_model import build_tower, load_whole

FUSED = ("gemma3", "idefics3", "internvl", "llava", "llava_onevision", "paligemma", "smolvlm")
OTHERS = ("mistral3", "qwen2_vl")
"""RMS norms, rotary embedding and a gated MLP; norms and activation of the MLP match the architecture."""


def load(path: Path, name: str, attention: str) -> tuple[AnyTower, nn.Module]:
    family = VISION_ARCHITECTURES[name].family or name
    model = load_whole(
        build_tower(str(path), family),
        str(path),
        dtype=torch.bfloat16,
        device="cpu",
        progress=lambda _label, _fraction: None,
    )
    backend = choose_backend(WorkerSettings(attention=attention), torch.bfloat16)
    assert isinstance(backend, Backend)
    backend.prepare_any_tower(model)
    return AnyTower(model, torch.bfloat16), model


def fused_layers(model: nn.Module) -> int:
    """Return the number of layers with fused code."""
    return sum(isinstance(each.forward, FusedEncoderLayer) for each in model.modules())


@pytest.mark.parametrize("name", FUSED)
@torch.inference_mode()
def test_fused_towers_equal_the_modules(tmp_path: Path, name: str) -> None:
    """Including crops, masks of padded crops, and hidden states of an earlier layer."""
    save_model(name, tmp_path)
    (exact, modules), (fused, model) = (load(tmp_path, name, kind) for kind in ("exact", "auto"))
    assert fused_layers(model) >= 2
    assert not fused_layers(modules)
    for image in images_of(name):
        wanted, found = exact(image).float(), fused(image).float()
        assert wanted.std() > 0.1
        assert (wanted - found).abs().max() < WITHIN * wanted.abs().max()


@pytest.mark.parametrize("name", OTHERS)
def test_towers_of_other_architectures_keep_their_modules(tmp_path: Path, name: str) -> None:
    save_model(name, tmp_path)
    _, model = load(tmp_path, name, "auto")
    assert not fused_layers(model)


def test_float32_keeps_the_modules(tmp_path: Path) -> None:
    save_model("llava", tmp_path)
    model = load_whole(
        build_tower(str(tmp_path), "llava"),
        str(tmp_path),
        dtype=torch.float32,
        device="cpu",
        progress=lambda _label, _fraction: None,
    )
    backend: Any = choose_backend(WorkerSettings(), torch.float32)
    backend.prepare_any_tower(model)
    assert not fused_layers(model)


class Layers(nn.Module):
    """Layers of SigLIP alone."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class OtherLayer(SiglipEncoderLayer):
    """Has the modules of the architecture, but combines them differently."""

    def forward(self, hidden_states: Any, attention_mask: Any = None, **_: object) -> Any:
        attended, _weights = self.self_attn(self.layer_norm1(hidden_states), attention_mask)
        return hidden_states + attended + self.mlp(self.layer_norm2(hidden_states))


def drawn_layer(kind: type[nn.Module], *, head_dim: int = 72, act: str = "gelu") -> nn.Module:
    torch.manual_seed(3)
    config = SiglipVisionConfig(
        hidden_size=2 * head_dim,
        intermediate_size=200,
        num_attention_heads=2,
        hidden_act=act,
    )
    config._attn_implementation = "sdpa"
    layer = kind(config)
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, 0.2)
    return layer.bfloat16().eval().requires_grad_(requires_grad=False)


@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh", "quick_gelu"])
@pytest.mark.parametrize("head_dim", [64, 72])
@pytest.mark.parametrize("masked", [False, True])
@torch.inference_mode()
def test_a_layer_equals_the_module_and_overwrites_nothing(
    act: str, head_dim: int, masked: bool
) -> None:
    """Heads that are not whole vectors as well; several blocks of rows, and sequences with masked ends."""
    exact, model = (
        Layers(drawn_layer(SiglipEncoderLayer, head_dim=head_dim, act=act)) for _ in "12"
    )
    made = merge_encoders(model)
    assert len(made) == 1
    pack_linears(model, functools.partial(make_product, threads=1))
    fuse_encoders(made, 1)
    hidden = torch.randn(
        3, 150, 2 * head_dim, generator=torch.Generator().manual_seed(1)
    ).bfloat16()
    given, mask = hidden.clone(), None
    if masked:
        mask = torch.ones(3, 1, 150, 150, dtype=torch.bool)
        mask[1, :, :, 3:] = False
    wanted = exact.layers[0](hidden, attention_mask=mask).float()
    found = model.layers[0](hidden, attention_mask=mask).float()
    assert torch.equal(hidden, given)
    assert (wanted - found).abs().max() < WITHIN * wanted.abs().max()


def test_modules_with_other_computations_are_not_fused() -> None:
    assert not merge_encoders(Layers(drawn_layer(OtherLayer)))
    assert not merge_encoders(Layers(drawn_layer(SiglipEncoderLayer, act="relu")))
    assert merge_encoders(Layers(drawn_layer(SiglipEncoderLayer)))
