"""The layers of a language model as transformers' modules run them; merging of their modules, and rotary angles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from vsched_workers.backends.base import Product
from vsched_workers.batching.packed_step import Images
from vsched_workers.batching.paged_attention import PagedStep, running
from vsched_workers.families.decoders import Decoder, LogitRule
from vsched_workers.parallel.slicing import SummedLinear
from vsched_workers.quantized.layers import QuantizedLinear, merged_quantized, plain_weight


class ModuleLayers:
    """Transformers' model, run over a packed batch; see `LanguageLayers`."""

    def __init__(
        self,
        model: Any,
        send: Callable[[npt.NDArray[np.int64]], torch.Tensor],
        *,
        axes: bool,
    ) -> None:
        """Take the model; `send` copies row numbers to its device, `axes` is whether it uses mrope."""
        self._model = model
        self._send = send
        self._axes = axes

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        images: Images | None,
        wanted: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """Return the normalized hidden states of the wanted rows, [wanted, hidden]."""
        embeds = self._model.embed_tokens(token_ids)
        options: dict[str, Any] = {}
        if images is not None:
            rows = self._send(images.rows)
            embeds[rows] = images.levels[0]
            if len(images.levels) > 1:
                mask = torch.zeros(1, len(token_ids), dtype=torch.bool, device=embeds.device)
                mask[0, rows] = True
                options["visual_pos_masks"] = mask
                options["deepstack_visual_embeds"] = list(images.levels[1:])
        with running(step):  # not every model passes arguments on to its layers
            out = self._model(
                inputs_embeds=embeds[None],
                position_ids=positions if self._axes else positions[0],
                use_cache=False,
                **options,
            )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden[self._send(wanted)] if len(wanted) < len(hidden) else hidden


class RuledHead:
    """An output projection with divided or soft-capped logits, computed as in transformers."""

    def __init__(self, product: Product, rule: LogitRule) -> None:
        self._product = product
        self._rule = rule

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocabulary] of hidden states [rows, hidden]."""
        logits = self._product(hidden)
        divisor, bound = self._rule
        if divisor is not None:
            logits = logits / divisor
        if bound is not None:
            logits = torch.tanh(logits / bound) * bound
        return logits


def stored_bytes(*tensors: torch.Tensor) -> int:
    """Return the bytes of the storages of tensors; shared storage, as of tied weights, counts once."""
    kept = {each.untyped_storage().data_ptr(): each for each in tensors}
    return sum(each.untyped_storage().nbytes() for each in kept.values())


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
    if decoder.unfit(model.config) or not all(
        _is_described(each, decoder) for each in model.layers
    ):
        return False
    for layer in model.layers:
        attention = MergedAttention(getattr(layer, decoder.attention), decoder)
        setattr(layer, decoder.attention, attention)
        feed_forward = getattr(layer, decoder.feed_forward)
        if hasattr(feed_forward, decoder.down):  # a mixture of experts stays as it is
            setattr(layer, decoder.feed_forward, CutFeedForward(feed_forward, decoder))
    return True


def _is_described(layer: nn.Module, decoder: Decoder) -> bool:
    """Return whether all modules with weights of a layer and of its attention are in the description."""
    norms, attention = decoder.norms, getattr(layer, decoder.attention)
    named = {norms.before_attention, norms.after_attention, decoder.attention}
    named |= {norms.before_feed_forward, norms.after_feed_forward, decoder.feed_forward}
    of_attention = {*decoder.qkv, decoder.output, decoder.query_norm, decoder.key_norm}
    return _with_weights(layer) <= named and _with_weights(attention) <= of_attention


def _with_weights(module: nn.Module) -> set[str]:
    return {
        name for name, child in module.named_children() if any(True for _ in child.parameters())
    }


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


Angles = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Computes cosines and sines [rows, head dim / 2] of positions [4, 1, rows]: the text's and three of mrope."""


def angles_of(rotary: Any, kind: str, *, axes: bool, dtype: torch.dtype) -> Angles:
    """Return the angles of a model's rotary embedding, for a kind of layer if kinds have separate frequencies.

    `axes` is whether the model uses mrope; cosines and sines have type `dtype`.
    """
    return AxesAngles(rotary, dtype) if axes else TextAngles(rotary, kind, dtype)


class TextAngles:
    """Rotary embedding angles for text positions.

    The frequencies and the factor are those that transformers initializes, of any type (linear, yarn, llama3). Some
    types change them beyond an original length; the context is then limited to that length.
    """

    def __init__(self, rotary: Any, kind: str, dtype: torch.dtype) -> None:
        prefix = f"{kind}_" if kind else ""
        self._frequencies: torch.Tensor = getattr(rotary, f"{prefix}inv_freq")
        self._scaling: float = getattr(rotary, f"{prefix}attention_scaling")
        self._dtype = dtype

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines; see `Angles`."""
        angles = positions[0, 0, :, None].float() * self._frequencies
        return _pair(angles, self._scaling, self._dtype)


class AxesAngles:
    """Rotary embedding angles for mrope: positions on three axes."""

    def __init__(self, rotary: Any, dtype: torch.dtype) -> None:
        self._rotary = rotary
        self._dtype = dtype
        self._half: int = len(rotary.inv_freq)
        device = rotary.inv_freq.device
        one = torch.eye(3, dtype=torch.int64, device=device)[:, None]
        _, sin = rotary(torch.empty(0, dtype=torch.float32, device=device), one)
        # A frequency belongs to the axis that alone changes its angle.
        changed = sin[0, :, : self._half].ne(0)
        self._axes = changed.int().argmax(0)
        self._fixed = rotary.rope_type == "default" and bool((changed.sum(0) == 1).all())

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines; see `Angles`."""
        if self._fixed:
            angles = positions[1:, 0].t().float().index_select(1, self._axes)
            angles *= self._rotary.inv_freq
            return _pair(angles, self._rotary.attention_scaling, self._dtype)
        cos, sin = self._rotary(positions.new_empty(0, dtype=self._dtype), positions[1:])
        return cos[0, :, : self._half].contiguous(), sin[0, :, : self._half].contiguous()


def _pair(
    angles: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)
