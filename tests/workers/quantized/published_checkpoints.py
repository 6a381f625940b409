"""Writes quantized checkpoints in published formats, and float32 ones with the dequantized weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
GROUP = 32


class Published(NamedTuple):
    """One layer in a published format: its tensors by suffix, and the dequantized weight in float32."""

    tensors: Tensors
    weight: torch.Tensor


def _words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned values [rows, n] into int32, the lowest bits first."""
    count = 32 // bits
    words = torch.zeros(len(values), values.shape[1] // count, dtype=torch.int64)
    for place in range(count):
        words |= values[:, place::count].to(torch.int64) << bits * place
    return words.where(words < 1 << 31, words - (1 << 32)).to(torch.int32)


def _levels(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return unsigned values [out, in], scales and zero points [out, groups], and the dequantized weight."""
    groups = weight.unflatten(1, (-1, group))
    top = (1 << bits) - 1
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / top).half().float()
    zeros = (-low / scales).round().clamp(0, top)
    if symmetric:
        scales = (groups.abs().amax(-1) / (top // 2)).half().float()
        zeros = torch.full_like(scales, 1 << bits - 1)
    levels = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, top)
    stands_for = (levels - zeros[..., None]) * scales[..., None]
    return levels.flatten(1).long(), scales, zeros.long(), stands_for.flatten(1)


def _packed(weight: torch.Tensor, bits: int, *, symmetric: bool) -> Published:
    levels, scales, zeros, stands_for = _levels(weight, bits, GROUP, symmetric=symmetric)
    tensors = {
        "weight_packed": _words(levels, bits),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _words(zeros.T, bits).T.contiguous()
    return Published(tensors, stands_for)


def _int8(weight: torch.Tensor) -> Published:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    values = (weight / scales.float()).round().clamp(-128, 127)
    tensors = {"weight": values.to(torch.int8), "weight_scale": scales}
    return Published(tensors, values * scales.float())


def _fp8(weight: torch.Tensor) -> Published:
    scales = weight.abs().amax(1, keepdim=True) / 448
    values = (weight / scales).to(torch.float8_e4m3fn)
    return Published({"weight": values, "weight_scale": scales}, values.float() * scales)


def _fp8_blocks(weight: torch.Tensor) -> Published:
    rows, columns = (-(-size // GROUP) for size in weight.shape)
    scales = torch.rand(rows, columns, generator=torch.Generator().manual_seed(0)) / 100 + 0.01
    spread = scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    spread = spread[: weight.shape[0], : weight.shape[1]]
    values = (weight / spread).to(torch.float8_e4m3fn)
    return Published({"weight": values, "weight_scale_inv": scales}, values.float() * spread)


def _gptq(weight: torch.Tensor, bits: int, *, less: int = 1) -> Published:
    levels, scales, zeros, stands_for = _levels(weight, bits, GROUP, symmetric=False)
    zeros = zeros.clamp(min=less)
    stands_for = (levels.unflatten(1, (-1, GROUP)) - zeros[..., None]) * scales[..., None]
    inputs = weight.shape[1]
    tensors = {
        "qweight": _words(levels, bits).T.contiguous(),
        "qzeros": _words((zeros - less).T, bits),
        "scales": scales.half().T.contiguous(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }
    return Published(tensors, stands_for.flatten(1))


def shuffled(inputs: int) -> torch.Tensor:
    """Return the order in which GPTQ quantizes inputs: the same for all layers with as many inputs."""
    return torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))


def _ordered(
    weight: torch.Tensor, make: Callable[[torch.Tensor], Published], levels: str, groups: str
) -> Published:
    """Quantize groups of permuted inputs; values are stored in the layer's order."""
    order = shuffled(weight.shape[1])
    back = order.argsort()
    made = make(weight[:, order])
    words = made.tensors[levels]
    by_rows = words if levels == "weight_packed" else words.T
    bits = 32 * by_rows.shape[1] // weight.shape[1]
    places = torch.arange(32 // bits) * bits
    values = (by_rows[..., None].long() >> places & (1 << bits) - 1).flatten(1)[:, back]
    words = _words(values, bits)
    tensors = made.tensors | {
        levels: words if levels == "weight_packed" else words.T.contiguous(),
        groups: (back // GROUP).to(torch.int32),
    }
    return Published(tensors, made.weight[:, back])


def _awq(weight: torch.Tensor) -> Published:
    levels, scales, zeros, stands_for = _levels(weight, 4, GROUP, symmetric=False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def ordered(values: torch.Tensor) -> torch.Tensor:
        by_eight = values.T.reshape(len(values.T), -1, 8)
        return by_eight[:, :, order].flatten(1)

    tensors = {
        "qweight": _words(ordered(levels), 4),
        "qzeros": _words(ordered(zeros), 4),
        "scales": scales.half().T.contiguous(),
    }
    return Published(tensors, stands_for)


def _compressed(form: str, bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True} | more
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


_IN_GROUPS: dict[str, Any] = {"strategy": "group", "group_size": GROUP}
FORMATS: Mapping[str, tuple[dict[str, Any], Callable[[torch.Tensor], Published]]] = {
    "compressed int4": (
        _compressed("pack-quantized", 4, "int", **_IN_GROUPS),
        lambda weight: _packed(weight, 4, symmetric=True),
    ),
    "compressed int4 with zeros": (
        _compressed("pack-quantized", 4, "int", **_IN_GROUPS, symmetric=False),
        lambda weight: _packed(weight, 4, symmetric=False),
    ),
    "compressed int8 packed": (
        _compressed("pack-quantized", 8, "int", **_IN_GROUPS),
        lambda weight: _packed(weight, 8, symmetric=True),
    ),
    "compressed int8": (_compressed("int-quantized", 8, "int", "channel"), _int8),
    "compressed fp8": (_compressed("float-quantized", 8, "float", "channel"), _fp8),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}, _fp8_blocks),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False},
        lambda weight: _gptq(weight, 4),
    ),
    "gptq in order of activations": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        lambda weight: _ordered(weight, lambda each: _gptq(each, 4), "qweight", "g_idx"),
    ),
    "compressed int4 in order of activations": (
        _compressed("pack-quantized", 4, "int", **_IN_GROUPS, actorder="group"),
        lambda weight: _ordered(
            weight, lambda each: _packed(each, 4, symmetric=True), "weight_packed", "weight_g_idx"
        ),
    ),
    "gptq of 8 bits": (
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": False},
        lambda weight: _gptq(weight, 8),
    ),
    "gptq_v2": (
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "checkpoint_format": "gptq_v2",
        },
        lambda weight: _gptq(weight, 4, less=0),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
        _awq,
    ),
}
"""The entries of `config.json`, and the writer of a layer."""


def publish(source: Path, quantized: Path, twin: Path, name: str) -> None:
    """Write a quantized checkpoint, and one in float32 with its dequantized weights."""
    said, make = FORMATS[name]
    for target in (quantized, twin):
        shutil.copytree(source, target)
    for file in source.glob("*.safetensors"):
        published: Tensors = {}
        plain: Tensors = {}
        for full, tensor in load_file(file).items():
            layer, _, end = full.rpartition(".")
            if end == "weight" and tensor.dim() == 2 and layer.endswith("_proj"):
                made = make(tensor.float())
                published |= {f"{layer}.{key}": value for key, value in made.tensors.items()}
                plain[full] = made.weight.contiguous()
            else:
                published[full] = plain[full] = tensor
        save_file(published, quantized / file.name, metadata={"format": "pt"})
        save_file(plain, twin / file.name, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
