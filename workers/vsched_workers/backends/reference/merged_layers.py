"""Merging and splitting of a layer's modules for fused layers, before their weights are packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vsched_workers.families.decoder import Decoder
from vsched_workers.parallel.slicing import SummedLinear
from vsched_workers.quantized.layers import QuantizedLinear, merged_quantized, plain_weight


class MergedAttention(nn.Module):
    """The attention of one layer with a merged query, key and value projection."""

    def __init__(self, attention: Any, decoder: Decoder) -> None:
        super().__init__()
        self.qkv_proj: nn.Module = merged([getattr(attention, name) for name in decoder.qkv])
        self.o_proj: Any = getattr(attention, decoder.output)
        self.query_norm: Any = getattr(attention, decoder.query_norm, None)
        self.key_norm: Any = getattr(attention, decoder.key_norm, None)
        self.head_dim: int = attention.head_dim
        summed = self.o_proj.partial if isinstance(self.o_proj, SummedLinear) else self.o_proj
        self.heads = summed.in_features // self.head_dim
        self.kv_heads = (self.qkv_proj.out_features // self.head_dim - self.heads) // 2
        self.scaling: float = attention.scaling
        self.index: int = attention.layer_idx


class CutFeedForward(nn.Module):
    """The feed-forward of one layer, with separate gate and up projections."""

    def __init__(self, module: Any, decoder: Decoder) -> None:
        super().__init__()
        linears: list[nn.Linear] = [getattr(module, name) for name in decoder.gate_up]
        gate, up = linears if len(linears) == 2 else _halves(linears[0])
        self.gate_proj: nn.Module = gate
        self.up_proj: nn.Module = up
        self.down_proj: nn.Module = getattr(module, decoder.down)


def fuse(model: Any, decoder: Decoder) -> bool:
    """Merge and split the first projections of every layer; return whether the layers can be fused.

    The linear layers are packed afterwards, before `FusedLanguage` is built from the model.
    """
    if decoder.unfit(model.config):
        return False
    for layer in model.layers:
        attention = MergedAttention(getattr(layer, decoder.attention), decoder)
        feed_forward = CutFeedForward(getattr(layer, decoder.feed_forward), decoder)
        setattr(layer, decoder.attention, attention)
        setattr(layer, decoder.feed_forward, feed_forward)
    return True


def merged(linears: Sequence[nn.Linear]) -> nn.Linear:
    """Return one linear layer in place of several with the same input."""
    if len(linears) == 1:
        return linears[0]
    biases: list[torch.Tensor] = [each.bias for each in linears if each.bias is not None]
    assert len(biases) in {0, len(linears)}, "all or none have a bias"
    outputs = sum(each.out_features for each in linears)
    quantized = merged_quantized(linears)
    merged = quantized or nn.Linear(linears[0].in_features, outputs, bool(biases), device="meta")
    if quantized is None:
        merged.weight = frozen(torch.cat([plain_weight(each) for each in linears]))
    if biases:
        merged.bias = frozen(torch.cat(biases))
    return merged


def _halves(linear: nn.Linear) -> list[nn.Linear]:
    """Return two linear layers that are views of the halves of one."""
    halves = []
    quantized = linear.quantized if isinstance(linear, QuantizedLinear) else None
    weights: Sequence[Any] = linear.weight.chunk(2) if quantized is None else quantized.chunks(2)
    for index, weight in enumerate(weights):
        half = nn.Linear(linear.in_features, len(weight), linear.bias is not None, device="meta")
        if quantized is None:
            half.weight = frozen(weight)
        else:
            half = QuantizedLinear(half, weight)
        if linear.bias is not None:
            half.bias = frozen(linear.bias.chunk(2)[index])
        halves.append(half)
    return halves


def frozen(values: torch.Tensor) -> nn.Parameter:
    """Return values as a parameter without gradient."""
    return nn.Parameter(values, requires_grad=False)
