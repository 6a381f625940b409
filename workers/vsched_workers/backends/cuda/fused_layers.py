"""Fused layers of a language model on a GPU: four matrix products per layer and four kernels between them.

transformers' modules launch about forty-five kernels per layer, most of them over so few values that launching
dominates, even in a captured step. Here a layer is four matrix products (merged query, key and value; output; merged
gate and up; down), three kernels of `triton_kernels.py`, and attention.

The computation follows from the model's decoder description (`families/decoders.py`). Other models, and models with
LoRA adapters, keep transformers' modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from vsched_workers.backends.base import Product
from vsched_workers.backends.cuda.products import RowProduct, power_of_two, with_row_kernel
from vsched_workers.backends.reference.layers import MergedAttention, angles_of, merged
from vsched_workers.batching.paged_attention import PagedStep, attend_with_kernels

if TYPE_CHECKING:
    from vsched_workers.batching.packed_step import Images
    from vsched_workers.families.decoders import Decoder

GATE_VALUES = 1024
"""Values of a row per program of the gate kernel."""


class LayerKernels(NamedTuple):
    """The kernels of `triton_kernels.py`, or stand-ins for them."""

    add_norm: Any
    rotate_and_store: Any
    gate: Any
    multiply_row: Any


def fits(decoder: Decoder, config: Any) -> bool:
    """Return whether the layers of a model can be fused here."""
    if decoder.unfit(config) or not decoder.adds_plainly or decoder.norms_all_heads:
        return False
    if decoder.experts:
        return False
    return decoder.score_bound(config) is None and all(
        kind.window is None and kind.rotates and not kind.frequencies
        for kind in decoder.kinds(config)
    )


@dataclass(slots=True)
class _GpuLayer:
    """One layer: its projections, norms and sizes; `eps` is that of the norms of heads."""

    qkv: Product
    output: Product
    gate_up: Product
    down: Product
    norm: GpuNorm
    middle: GpuNorm
    attention: MergedAttention
    eps: float


class GpuNorm(NamedTuple):
    """An RMS norm, or a layer norm if it has a bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float


class FusedLayers:
    """The fused layers of a model that `fits`; see `LanguageLayers`."""

    def __init__(
        self,
        model: Any,
        decoder: Decoder,
        send: Callable[[npt.NDArray[np.int64]], torch.Tensor],
        kernels: LayerKernels,
    ) -> None:
        """Take the model, with merged projections; `send` copies row numbers to its device."""
        self._model, self._send, self._kernels = model, send, kernels
        self._activation = decoder.activation(model.config).name
        self._rows_factor = decoder.rows_factor(model.config)
        self._layers = [_layer_of(layer, decoder, kernels) for layer in model.layers]
        self._by_module = dict(zip(model.layers, self._layers, strict=True))
        self._last = norm_of(model.norm)
        self._angles = angles_of(
            model.rotary_emb, "", axes=decoder.axes, dtype=model.norm.weight.dtype
        )

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        images: Images | None,
        wanted: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """Return the normalized hidden states of the wanted rows, [wanted, hidden]."""
        hidden = self._model.embed_tokens(token_ids)
        levels: Sequence[torch.Tensor] = ()
        places = None
        if images is not None:
            places = self._send(images.rows)
            hidden[places] = images.levels[0]
            levels = list(images.levels[1:])
        if self._rows_factor != 1.0:
            hidden *= self._rows_factor
        angles = self._angles(positions)
        # A profiling run may have removed layers.
        layers = [self._by_module[layer] for layer in self._model.layers]
        norms = [*(layer.norm for layer in layers), self._last]
        run = _Buffers(hidden)
        self._add_norm(run, None, norms[0])
        for index, (layer, following) in enumerate(zip(layers, norms[1:], strict=True)):
            attended = self._attend(layer, layer.qkv(run.normed), angles, step, run)
            self._add_norm(run, layer.output(attended), layer.middle)
            made = layer.down(self._gated(layer, run))
            self._add_norm(run, made, following)
            if index < len(levels):
                hidden[places] += levels[index]
                self._add_norm(run, None, following)
        normed = run.normed
        return normed[self._send(wanted)] if len(wanted) < len(normed) else normed

    def _attend(
        self,
        layer: _GpuLayer,
        qkv: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        step: PagedStep,
        run: _Buffers,
    ) -> torch.Tensor:
        """Attend, [rows, heads * head dim]; keys and values are written to the cache."""
        attention = layer.attention
        heads, kv_heads, head_dim = attention.heads, attention.kv_heads, attention.head_dim
        keys, values = step.cache.keys[attention.index], step.cache.values[attention.index]
        count = len(qkv)
        queries = run.queries
        if queries is None:
            queries = run.queries = qkv.new_empty(count, heads, head_dim)
        query_norm, key_norm = attention.query_norm, attention.key_norm
        self._kernels.rotate_and_store[count, heads + 2 * kv_heads](
            qkv,
            *angles,
            step.slots,
            keys if query_norm is None else query_norm.weight,
            keys if key_norm is None else key_norm.weight,
            queries,
            keys,
            values,
            layer.eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            NORMS=query_norm is not None,
            HALF=head_dim // 2,
            DIMS=power_of_two(head_dim // 2),
            num_warps=1,
        )
        turned = queries.transpose(0, 1)
        own = turned, turned
        if step.segments:
            parts = qkv.view(count, heads + 2 * kv_heads, head_dim).transpose(0, 1)
            own = parts[heads : heads + kv_heads], parts[heads + kv_heads :]
        return attend_with_kernels(turned, *own, attention.index, step, attention.scaling).flatten(
            1
        )

    def _add_norm(self, run: _Buffers, added: torch.Tensor | None, norm: GpuNorm) -> None:
        """Add to the hidden states of a step, and normalize them into its buffer."""
        hidden, width = run.hidden, run.hidden.shape[1]
        self._kernels.add_norm[(len(hidden),)](
            hidden,
            hidden if added is None else added,
            norm.weight,
            run.normed,
            width,
            norm.eps,
            HAS_ADDED=added is not None,
            WIDTH=power_of_two(width),
        )

    def _gated(self, layer: _GpuLayer, run: _Buffers) -> torch.Tensor:
        """Return the gated values of the normalized rows of a step, [rows, inner size]."""
        if isinstance(layer.gate_up, RowProduct):
            done = layer.gate_up.gated(run.normed, self._activation)
            if done is not None:
                return done
        gate_up = layer.gate_up(run.normed)
        width = gate_up.shape[1] // 2
        gated = run.gated
        if gated is None:
            gated = run.gated = gate_up.new_empty(len(gate_up), width)
        self._kernels.gate[len(gate_up), -(-width // GATE_VALUES)](
            gate_up, gated, width, ACTIVATION=self._activation, WIDTH=GATE_VALUES
        )
        return gated


class _Buffers:
    """Activations of a step that every layer writes again: later kernels on the stream start after their readers."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden, self.normed = hidden, torch.empty_like(hidden)
        self.queries: torch.Tensor | None = None
        self.gated: torch.Tensor | None = None


def merge(model: Any, decoder: Decoder) -> None:
    """Merge the query, key and value projections, and gate and up, of every layer."""
    for layer in model.layers:
        attention = MergedAttention(getattr(layer, decoder.attention), decoder)
        setattr(layer, decoder.attention, attention)
        module = getattr(layer, decoder.feed_forward)
        feed_forward = MergedFeedForward(module, decoder.gate_up, decoder.down)
        setattr(layer, decoder.feed_forward, feed_forward)


class MergedFeedForward(nn.Module):
    """The feed-forward of one layer with a merged gate and up projection."""

    def __init__(self, module: Any, gate_up: Sequence[str], down: str) -> None:
        """Take a feed-forward, and the names of its projections."""
        super().__init__()
        self.gate_up_proj: nn.Module = merged([getattr(module, name) for name in gate_up])
        self.down_proj: nn.Module = getattr(module, down)


def trial(kernels: LayerKernels, dtype: torch.dtype, device: str) -> float:
    """Return the largest difference to torch's operations, for sizes that are not powers of two."""
    rows, width, heads, kv_heads, half = 3, 80, 3, 2, 12
    seed = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=seed).to(device, dtype)

    hidden, added, weight = drawn(rows, width), drawn(rows, width), drawn(width)
    wanted = functional.rms_norm((hidden + added).float(), (width,), eps=1e-6) * weight.float()
    normed = torch.empty_like(hidden)
    kernels.add_norm[(rows,)](
        hidden, added, weight, normed, width, 1e-6, HAS_ADDED=True, WIDTH=power_of_two(width)
    )
    gate_up, gated = drawn(rows, 2 * width), torch.empty_like(hidden)
    opened = functional.silu(gate_up[:, :width].float()) * gate_up[:, width:].float()
    kernels.gate[rows, 1](gate_up, gated, width, ACTIVATION="SILU", WIDTH=GATE_VALUES)
    qkv, angles = drawn(rows, (heads + 2 * kv_heads) * 2 * half), torch.rand(rows, half)
    given = qkv.float().view(rows, -1, 2, half)
    cos, sin = (each.to(device, dtype) for each in (angles.cos(), angles.sin()))
    first, second = given[:, :, 0], given[:, :, 1]
    wide = cos.float()[:, None], sin.float()[:, None]
    turned = torch.cat(
        (first * wide[0] - second * wide[1], second * wide[0] + first * wide[1]), dim=-1
    )
    queries = qkv.new_empty(rows, heads, 2 * half)
    keys, values = (qkv.new_zeros(rows + 1, kv_heads, 2 * half) for _ in range(2))
    slots = torch.arange(rows, 0, -1, device=device)
    kernels.rotate_and_store[rows, heads + 2 * kv_heads](
        qkv, cos, sin, slots, keys, keys, queries, keys, values, 0.0,
        HEADS=heads, KV_HEADS=kv_heads, NORMS=False, HALF=half, DIMS=power_of_two(half),
        num_warps=1,
    )  # fmt: skip
    matrix, bias = drawn(2 * width, 64), drawn(2 * width)
    row = drawn(1, 64) / 8
    plain = row.float() @ matrix.float().T
    half_gated = functional.silu(plain[:, :width]) * plain[:, width:]
    multiplied = RowProduct(matrix, bias, kernels.multiply_row)(row)
    row_gated = RowProduct(matrix, None, kernels.multiply_row).gated(row, "SILU")
    assert row_gated is not None, "the sizes fit"
    pairs = [
        (multiplied, plain + bias.float()),
        (row_gated, half_gated),
        (normed, wanted),
        (gated, opened),
        (queries, turned[:, :heads]),
        (keys[slots], turned[:, heads:-kv_heads]),
        (values[slots], given[:, -kv_heads:].flatten(2)),
    ]
    apart = torch.stack([(found.float() - right).abs().max() for found, right in pairs])
    return float(apart.max())  # NaN if one is


def _layer_of(layer: Any, decoder: Decoder, kernels: LayerKernels) -> _GpuLayer:
    attention: MergedAttention = getattr(layer, decoder.attention)
    feed_forward: MergedFeedForward = getattr(layer, decoder.feed_forward)
    norms = decoder.norms
    qkv, output, gate_up, down = (
        with_row_kernel(each, kernels.multiply_row)
        for each in (
            attention.qkv_proj,
            attention.o_proj,
            feed_forward.gate_up_proj,
            feed_forward.down_proj,
        )
    )
    return _GpuLayer(
        qkv=qkv,
        output=output,
        gate_up=gate_up,
        down=down,
        norm=norm_of(getattr(layer, norms.before_attention)),
        middle=norm_of(getattr(layer, norms.before_feed_forward)),
        attention=attention,
        eps=0.0 if attention.query_norm is None else norm_of(attention.query_norm).eps,
    )


def norm_of(module: Any) -> GpuNorm:
    """Return a norm of torch or transformers."""
    eps: float = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return GpuNorm(module.weight, getattr(module, "bias", None), eps)
