"""Fused layers of a language model on a GPU: four matrix products per layer and four kernels between them.

transformers' modules launch about forty-five kernels per layer, most of them over so few values that launching
dominates, even in a captured step. Here a layer is four matrix products (merged query, key and value; output; merged
gate and up; down), three kernels of `triton_layers.py`, and attention.

The computation follows from the model's decoder description (`families/decoder.py`). Other models, and models with LoRA
adapters, keep transformers' modules.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from vsched.errors import DeviceOutOfMemory
from vsched_workers.backends.base import Product
from vsched_workers.backends.cuda.attention import power_of_two
from vsched_workers.backends.cuda.launching import FastKernel
from vsched_workers.backends.cuda.linear import RowProduct, with_row_kernel
from vsched_workers.backends.cuda.parts import has_triton, parts_off
from vsched_workers.backends.reference.merged_layers import MergedAttention, merged
from vsched_workers.backends.reference.rotary_angles import angles_of
from vsched_workers.batching.paged_attention import PagedStep, attend_plainly
from vsched_workers.memory.out_of_memory import typed_out_of_memory

if TYPE_CHECKING:
    from vsched_workers.batching.packed_step import Images
    from vsched_workers.families.decoder import Decoder

logger = logging.getLogger(__name__)

GATE_VALUES = 1024
"""Values of a row per program of the gate kernel."""

AHEAD_ROWS_MAX = 256
"""The largest number of rows with fetching ahead: with more, kernels between the products keep the memory busy."""

AHEAD_BYTES = 8 << 20
"""Bytes of a weight that are fetched ahead: a normalization takes as long as this many bytes."""

AHEAD_ATTENTION_BYTES = 16 << 20
"""The same during attention, of each weight."""

AHEAD_LATER_ROWS_MAX = 16
"""The largest number of rows with attention that leaves time for two weights."""

AHEAD_CHUNK = 1024
"""Bytes that are fetched at once; such parts are spread over a weight: all programs of its product find some."""

_WITHIN = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


class LayerKernels(NamedTuple):
    """The kernels of `triton_layers.py` and `triton_linear.py`, or stand-ins for them."""

    add_norm: Any
    rotate_and_store: Any
    gate: Any
    multiply_row: Any


def load_kernels() -> LayerKernels | None:
    """Return the kernels; None if Triton is not installed."""
    if not has_triton():
        return None
    from vsched_workers.backends.cuda import triton_layers, triton_linear

    return LayerKernels(
        FastKernel(triton_layers.add_norm),
        FastKernel(triton_layers.rotate_and_store),
        FastKernel(triton_layers.gate),
        FastKernel(triton_linear.multiply_row),
    )


def fits(decoder: Decoder, config: Any) -> bool:
    """Return whether the layers of a model can be fused here."""
    if decoder.unfit(config) or not decoder.adds_plainly or decoder.norms_all_heads:
        return False
    return decoder.score_bound(config) is None and all(
        kind.window is None and kind.rotates and not kind.frequencies
        for kind in decoder.kinds(config)
    )


@dataclass(slots=True)
class _GpuLayer:
    """One layer: its projections, norms and sizes, and the weights to fetch ahead during its other kernels."""

    qkv: Product
    output: Product
    gate_up: Product
    down: Product
    norm: _GpuNorm
    middle: _GpuNorm
    attention: MergedAttention
    during_attention: Ahead | None = None
    later_in_attention: Ahead | None = None
    during_middle: Ahead | None = None
    during_gate: Ahead | None = None
    during_following: Ahead | None = None


class Ahead(NamedTuple):
    """A weight to fetch ahead: a number of parts of AHEAD_CHUNK bytes, `stride` bytes apart."""

    weight: torch.Tensor
    chunks: int
    stride: int

    @classmethod
    def of(cls, product: Any, limit: int, *, skip: int = 0) -> Ahead | None:
        """Return how to fetch up to `limit` bytes of a product's weight; None if it has no plain weight.

        `skip`: bytes before the first part, so that parts differ from those of another call.
        """
        if not isinstance(product, RowProduct) or product.weight.nbytes < AHEAD_CHUNK + skip:
            return None
        weight = product.weight.view(-1)[skip // product.weight.element_size() :]
        chunks = min(limit, weight.nbytes) // AHEAD_CHUNK
        # The instruction takes multiples of 16 bytes.
        return cls(weight, chunks, weight.nbytes // chunks // 16 * 16)


class _GpuNorm(NamedTuple):
    """An RMS norm: its weights and epsilon."""

    weight: torch.Tensor
    eps: float


class FusedLayers:
    """The fused layers of a model that `fits`; see `LanguageLayers`."""

    def __init__(
        self,
        model: Any,
        decoder: Decoder,
        send: Callable[[npt.NDArray[np.int64]], torch.Tensor],
        kernels: LayerKernels,
        *,
        fetches: bool = False,
    ) -> None:
        """Take the model, with merged projections; `send` copies row numbers to its device.

        `fetches`: the device can fetch weights ahead.
        """
        self._model, self._send, self._kernels = model, send, kernels
        self._activation = decoder.activation(model.config).name
        self._rows_factor = decoder.rows_factor(model.config)
        self._layers = [_layer_of(layer, decoder, kernels) for layer in model.layers]
        if fetches:
            _fetch_ahead(self._layers)
        self._by_module = dict(zip(model.layers, self._layers, strict=True))
        self._last = _norm_of(model.norm)
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
        run = _Buffers(hidden, fetches=not step.segments and len(hidden) <= AHEAD_ROWS_MAX)
        self._add_norm(run, None, norms[0], None)
        for index, (layer, following) in enumerate(zip(layers, norms[1:], strict=True)):
            attended = self._attend(layer, layer.qkv(run.normed), angles, step, run)
            self._add_norm(run, layer.output(attended), layer.middle, layer.during_middle)
            made = layer.down(self._gated(layer, run))
            self._add_norm(run, made, following, layer.during_following)
            if index < len(levels):
                hidden[places] += levels[index]
                self._add_norm(run, None, following, None)
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
        columns = heads + 2 * kv_heads
        ahead, more, rows = run.ahead(layer.during_attention, 32, columns)
        later, least, others = None, {}, 0
        if count <= AHEAD_LATER_ROWS_MAX:
            later, found, others = run.ahead(layer.later_in_attention, 32, columns)
            if found:
                least = {"LATER": others, "LATER_STRIDE": found["STRIDE"]}
        self._kernels.rotate_and_store[rows + others + count, columns](
            qkv,
            *angles,
            step.slots,
            keys if query_norm is None else query_norm.weight,
            keys if key_norm is None else key_norm.weight,
            queries,
            keys,
            values,
            0.0 if query_norm is None else _norm_of(query_norm).eps,
            ahead,
            later,
            HEADS=heads,
            KV_HEADS=kv_heads,
            NORMS=query_norm is not None,
            HALF=head_dim // 2,
            DIMS=power_of_two(head_dim // 2),
            **more,
            **least,
            num_warps=1,
        )
        turned = queries.transpose(0, 1)
        own = turned, turned
        if step.segments:
            parts = qkv.view(count, heads + 2 * kv_heads, head_dim).transpose(0, 1)
            own = parts[heads : heads + kv_heads], parts[heads + kv_heads :]
        return attend_plainly(turned, *own, attention.index, step, attention.scaling).flatten(1)

    def _add_norm(
        self, run: _Buffers, added: torch.Tensor | None, norm: _GpuNorm, ahead: Ahead | None
    ) -> None:
        """Add to the hidden states of a step, and normalize them into its buffer."""
        hidden, width = run.hidden, run.hidden.shape[1]
        following, more, rows = run.ahead(ahead, 128)
        self._kernels.add_norm[(rows + len(hidden),)](
            hidden,
            hidden if added is None else added,
            norm.weight,
            run.normed,
            width,
            norm.eps,
            following,
            HAS_ADDED=added is not None,
            WIDTH=power_of_two(width),
            **more,
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
        columns = -(-width // GATE_VALUES)
        following, more, rows = run.ahead(layer.during_gate, 128, columns)
        self._kernels.gate[rows + len(gate_up), columns](
            gate_up,
            gated,
            width,
            following,
            ACTIVATION=self._activation,
            WIDTH=GATE_VALUES,
            **more,
        )
        return gated


class _Buffers:
    """Activations of a step that every layer writes again: later kernels on the stream start after their readers."""

    def __init__(self, hidden: torch.Tensor, *, fetches: bool) -> None:
        self.hidden, self.normed = hidden, torch.empty_like(hidden)
        self.queries: torch.Tensor | None = None
        self.gated: torch.Tensor | None = None
        self._fetches = fetches

    def ahead(
        self, ahead: Ahead | None, each: int, width: int = 1
    ) -> tuple[torch.Tensor | None, dict[str, int], int]:
        """Return a kernel's arguments for a weight to fetch ahead, and the rows that they add to its grid.

        A program fetches `each` parts; the grid has `width` programs in a row.
        """
        if ahead is None or not self._fetches:
            return None, {}, 0
        rows = ahead.chunks // (each * width)
        if not rows:
            return None, {}, 0
        return ahead.weight, {"AHEAD": rows, "STRIDE": ahead.stride, "CHUNK": AHEAD_CHUNK}, rows


def merge(model: Any, decoder: Decoder) -> None:
    """Merge the query, key and value projections, and gate and up, of every layer."""
    for layer in model.layers:
        attention = MergedAttention(getattr(layer, decoder.attention), decoder)
        setattr(layer, decoder.attention, attention)
        setattr(layer, decoder.feed_forward, MergedFeedForward(layer, decoder))


class MergedFeedForward(nn.Module):
    """The feed-forward of one layer with a merged gate and up projection."""

    def __init__(self, layer: Any, decoder: Decoder) -> None:
        super().__init__()
        module = getattr(layer, decoder.feed_forward)
        self.gate_up_proj: nn.Module = merged([getattr(module, name) for name in decoder.gate_up])
        self.down_proj: nn.Module = getattr(module, decoder.down)


def usable_kernels(dtype: torch.dtype, device: str) -> LayerKernels | None:
    """Return the kernels if they run on a device and agree with torch's own operations.

    Raises:
        DeviceOutOfMemory: When the device's memory ran out.
    """
    kernels = load_kernels()
    if kernels is None:
        logger.info("no fused layer kernels: Triton is not installed")
        return None
    try:
        with typed_out_of_memory("trying fused layer kernels"):
            # The second run launches without Triton's dispatch.
            apart = max(_tried(kernels, dtype, device) for _ in range(2))
    except DeviceOutOfMemory:
        raise
    except Exception as error:  # noqa: BLE001  # a compiler may raise anything
        logger.warning("no fused layer kernels, which is slower: %s", error)
        return None
    if not apart <= _WITHIN[dtype]:  # rejects NaNs, too
        logger.warning("no fused layer kernels: the kernels are wrong by %.2g", apart)
        return None
    return kernels


def can_fetch_ahead(kernels: LayerKernels, dtype: torch.dtype, device: str) -> bool:
    """Return whether the kernels can load parts of a weight into the L2 cache of a device.

    Raises:
        DeviceOutOfMemory: When the device's memory ran out.
    """
    if "ahead" in parts_off() or torch.device(device).type != "cuda":
        return False
    if torch.cuda.get_device_capability(device) < (9, 0):
        return False
    try:
        with typed_out_of_memory("trying to fetch weights ahead"):
            apart = max(_tried(kernels, dtype, device, fetches=True) for _ in range(2))
    except DeviceOutOfMemory:
        raise
    except Exception as error:  # noqa: BLE001  # as above
        logger.warning("weights are not fetched ahead, which is slower: %s", error)
        return False
    return apart <= _WITHIN[dtype]


def _tried(
    kernels: LayerKernels, dtype: torch.dtype, device: str, *, fetches: bool = False
) -> float:
    """Return the largest difference to torch's operations, for sizes that are not powers of two.

    With `fetches`, one row of each grid fetches ahead.
    """
    rows, width, heads, kv_heads, half = 3, 80, 3, 2, 12
    seed = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=seed).to(device, dtype)

    following, more = None, {}
    if fetches:
        following = torch.zeros(1 << 16, dtype=torch.uint8, device=device)
        more = {"AHEAD": 1, "STRIDE": 128, "CHUNK": 128}
    extra, later = len(more) // 3, {}
    if fetches:
        later = {"LATER": 1, "LATER_STRIDE": 128}
    hidden, added, weight = drawn(rows, width), drawn(rows, width), drawn(width)
    wanted = functional.rms_norm((hidden + added).float(), (width,), eps=1e-6) * weight.float()
    normed = torch.empty_like(hidden)
    kernels.add_norm[(extra + rows,)](
        hidden, added, weight, normed, width, 1e-6, following,
        HAS_ADDED=True, WIDTH=power_of_two(width), **more,
    )  # fmt: skip
    gate_up, gated = drawn(rows, 2 * width), torch.empty_like(hidden)
    opened = functional.silu(gate_up[:, :width].float()) * gate_up[:, width:].float()
    kernels.gate[extra + rows, 1](
        gate_up, gated, width, following, ACTIVATION="SILU", WIDTH=GATE_VALUES, **more
    )
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
    kernels.rotate_and_store[2 * extra + rows, heads + 2 * kv_heads](
        qkv, cos, sin, slots, keys, keys, queries, keys, values, 0.0, following, following,
        HEADS=heads, KV_HEADS=kv_heads, NORMS=False, HALF=half, DIMS=power_of_two(half), **more, **later,
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
        norm=_norm_of(getattr(layer, norms.before_attention)),
        middle=_norm_of(getattr(layer, norms.before_feed_forward)),
        attention=attention,
    )


def _fetch_ahead(layers: Sequence[_GpuLayer]) -> None:
    """Let the kernels between the products of each layer fetch the weight of the next product."""
    for layer, following in itertools.zip_longest(layers, layers[1:]):
        layer.during_attention = Ahead.of(layer.output, AHEAD_ATTENTION_BYTES)
        layer.later_in_attention = Ahead.of(layer.gate_up, AHEAD_ATTENTION_BYTES)
        layer.during_middle = Ahead.of(layer.gate_up, AHEAD_BYTES, skip=AHEAD_CHUNK)
        layer.during_gate = Ahead.of(layer.down, AHEAD_BYTES)
        if following is not None:
            layer.during_following = Ahead.of(following.qkv, AHEAD_BYTES)


def _norm_of(module: Any) -> _GpuNorm:
    eps: float = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return _GpuNorm(module.weight, eps)
