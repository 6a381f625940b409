"""The layers of a language model in bfloat16 on a CPU, written out: five products a layer and little between them.

transformers' modules spend three quarters of a small decode step on calls: some forty-five a layer, each over all rows.
Here a layer is five products of packed weights, queries, keys and values being one of them, and four passes of
`kernels/elementwise.py`. One step's rows are filled up once to a number that packed weights are multiplied with, and
long ones are cut into blocks, so that what one product makes is still in the cache when the next takes it.

What a layer computes follows from the modules that it is made of. A model with a layer of another make keeps
transformers' modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional
from transformers.activations import SiLUActivation

from vsched_workers.backends.cpu.decode_attention import parts_of, use_threads
from vsched_workers.backends.cpu.kernels import elementwise as cpu_kernels
from vsched_workers.backends.cpu.kernels import heads as head_kernels
from vsched_workers.backends.cpu.kernels.decode_attention import scored_type
from vsched_workers.backends.cpu.modules import PackedLinear, Product, filled
from vsched_workers.backends.cpu.rotary_angles import Angles, Halves
from vsched_workers.backends.cpu.row_blocks import Block, Rows
from vsched_workers.parallel.slicing import SummedLinear

if TYPE_CHECKING:
    from vsched_workers.batching.packed_step import Images
    from vsched_workers.batching.paged_attention import PagedStep, Segment

PARALLEL_VALUES_MIN = 1 << 16
"""Passes over fewer values run on one thread: waking the others takes longer."""

USUAL_BLOCK = 16
"""Kernels for blocks of such a size are compiled at once, others by the profiling run."""

DECODE_VALUES_MIN = 1 << 18
"""The same for attention, in products of a query and a key."""


class FusedAttention(nn.Module):
    """The attention of one layer, its first three products merged."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        inputs, outputs = parts[0].in_features, sum(part.out_features for part in parts)
        merged = nn.Linear(inputs, outputs, parts[0].bias is not None, device="meta")
        merged.weight = _frozen([part.weight for part in parts])
        if parts[0].bias is not None:
            merged.bias = _frozen([part.bias for part in parts])
        self.qkv_proj: nn.Module = merged
        self.o_proj: nn.Module = attention.o_proj
        self.q_norm: Any = getattr(attention, "q_norm", None)
        self.k_norm: Any = getattr(attention, "k_norm", None)
        self.head_dim: int = attention.head_dim
        self.heads = parts[0].out_features // self.head_dim
        self.kv_heads = parts[1].out_features // self.head_dim
        self.scaling: float = attention.scaling
        self.index: int = attention.layer_idx


def _frozen(parts: Sequence[torch.Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat(list(parts)), requires_grad=False)


def fuse(model: Any) -> bool:
    """Merge the first products of every layer, and tell whether all layers look as it is written here.

    The linear layers are packed afterwards, and `FusedLanguage` made of the model.
    """
    if not all(_is_known(layer) for layer in model.layers):
        return False
    for layer in model.layers:
        layer.self_attn = FusedAttention(layer.self_attn)
    return True


def _is_known(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    linears: list[Any] = [getattr(attention, f"{name}_proj", None) for name in "qkv"]
    linears += [getattr(mlp, f"{name}_proj", None) for name in ("gate", "up")]
    summed = [getattr(attention, "o_proj", None), getattr(mlp, "down_proj", None)]
    head_dim, sliding = attention.head_dim, getattr(attention, "sliding_window", None)
    return (
        all(isinstance(each, nn.Linear) for each in linears)
        and all(isinstance(each, nn.Linear | SummedLinear) for each in summed)
        and len({each.bias is None for each in linears[:3]}) == 1
        and isinstance(mlp.act_fn, nn.SiLU | SiLUActivation)
        and head_dim % 2 == 0
        and sliding is None
    )


@dataclass(slots=True)
class Norm:
    """An RMS norm: where its weights lie, which the module owns."""

    weight: int
    width: int
    eps: np.float32

    @classmethod
    def of(cls, module: Any) -> Norm:
        """Take the weights of transformers' module."""
        weight: torch.Tensor = module.weight
        assert weight.is_contiguous(), "its values are read one after the other"
        return cls(weight.data_ptr(), len(weight), np.float32(module.variance_epsilon))


@dataclass(slots=True)
class _Layer:
    """One layer: its products, norms and sizes."""

    qkv: Product
    output: Product
    gate: Product
    up: Product
    down: Product
    norm: Norm
    middle: Norm
    query_weight: Halves
    key_weight: Halves
    head_eps: np.float32
    attention: FusedAttention


@dataclass(slots=True)
class _Heads:
    """What attention needs of a step beside the rows: angles and slot of each, room for prefill rows, and more.

    Shape: cos, sin [count, head dim / 2]; slots [count]; room [heads + 2 * kv heads, prefill rows, head dim].
    """

    cos: Halves
    sin: Halves
    slots: npt.NDArray[np.int64]
    room: torch.Tensor
    many: bool
    scored: npt.NDArray[Any]


class FusedLanguage:
    """Runs the layers of a model that `fuse` has accepted and whose linear layers are packed."""

    def __init__(self, model: Any, threads: int) -> None:
        self._model = model
        self._threads = threads
        self._layers = [_layer_of(layer) for layer in model.layers]
        self._angles = Angles(model.rotary_emb)
        self._last = Norm.of(model.norm)
        packed = [each.packed for each in model.modules() if isinstance(each, PackedLinear)]
        self._own = min((weight.own_rows_max for weight in packed), default=0)
        use_threads(threads)
        cpu_kernels.warm_up(threads=threads)
        head_dim = self._layers[0].attention.head_dim
        head_kernels.warm_up(scored_type(head_dim, USUAL_BLOCK), threads=threads)

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: PagedStep,
        images: Images | None,
        wanted: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """Return the normed hidden states of the wanted rows, [rows, hidden]; what fills them up comes after them.

        Wanted are all decode rows, and the last rows of some chunks.
        """
        count = len(token_ids)
        ids = functional.pad(token_ids, (0, filled(count, own=self._own) - count))
        hidden = functional.embedding(ids, self._model.embed_tokens.weight)
        levels: Sequence[torch.Tensor] = ()
        places = torch.empty(0)
        if images is not None:
            places = torch.from_numpy(images.rows)
            hidden[places] = images.levels[0]
            levels = list(images.levels[1:])
        first = self._layers[0].attention
        rows = Rows(hidden, hidden.new_empty(len(hidden), first.heads * first.head_dim), count)
        cos, sin = self._angles(positions)
        kinds = first.heads + 2 * first.kv_heads
        room = hidden.new_empty(kinds, count - step.decode_rows, first.head_dim)
        seen = int(step.contexts.sum()) * first.heads * first.head_dim
        heads = _Heads(
            cos,
            sin,
            step.slots.numpy(),
            room,
            self._many(seen, DECODE_VALUES_MIN),
            scored_type(first.head_dim, step.cache.block_size),
        )
        # A profiling run takes the first layers only, if any.
        layers = self._layers[: len(self._model.layers)]
        norms = [*(layer.norm for layer in layers), self._last]
        select = torch.from_numpy(wanted) if len(wanted) < count else None
        self._add_norm(rows, None, norms[0])
        for index, (layer, following) in enumerate(zip(layers, norms[1:], strict=True)):
            if select is not None and index + 1 == len(self._layers) > len(levels):
                # Nobody asks for the others any more, nor are any added to.
                self._attend(layer, rows, heads, step, _ends(step, wanted))
                rows, select = rows.only(select, self._own), None
            else:
                self._attend(layer, rows, heads, step, step.segments)
            self._feed_forward(layer, rows, following)
            if index < len(levels):
                rows.hidden[places] += levels[index]
                self._add_norm(rows, None, following)
        return rows.normed if select is None else rows.normed[select]

    def _attend(
        self,
        layer: _Layer,
        rows: Rows,
        heads: _Heads,
        step: PagedStep,
        segments: Sequence[Segment],
    ) -> None:
        """Attend: from the normed rows to the attended ones, keys and values written into the cache.

        Of the rows of prefill, those of `segments` are attended for.
        """
        attention = layer.attention
        keys, values = step.cache.arrays[attention.index]
        shared = (layer.query_weight, layer.key_weight, layer.head_eps)
        decode_rows = step.decode_rows
        turn = head_kernels.turn
        if self._many(heads.room.numel(), PARALLEL_VALUES_MIN):
            turn = head_kernels.turn_parallel
        for block in rows.blocks:
            qkv = layer.qkv(block.normed)
            start, stop = block.start, min(block.stop, rows.count)
            middle = min(max(decode_rows, start), stop)
            if start < middle:
                part = slice(start, middle)
                (head_kernels.decode_parallel if heads.many else head_kernels.decode)(
                    qkv.data_ptr(),
                    middle - start,
                    attention.heads,
                    heads.cos[part],
                    heads.sin[part],
                    heads.slots[part],
                    keys,
                    values,
                    step.tables[part],
                    step.contexts[part],
                    step.cache.block_size,
                    *shared,
                    np.float32(attention.scaling),
                    block.attended.data_ptr(),
                    parts_of(
                        middle - start, attention.kv_heads, self._threads if heads.many else 1
                    ),
                    heads.scored,
                )
            if middle < stop:
                part = slice(middle, stop)
                turn(
                    qkv.data_ptr() + (middle - start) * qkv.shape[1] * qkv.itemsize,
                    stop - middle,
                    attention.heads,
                    heads.cos[part],
                    heads.sin[part],
                    heads.slots[part],
                    keys,
                    values,
                    *shared,
                    heads.room.data_ptr() + (middle - decode_rows) * attention.head_dim * 2,
                    heads.room.shape[1],
                )
        self._attend_chunks(attention, rows, heads, step, segments)

    @staticmethod
    def _attend_chunks(
        attention: FusedAttention,
        rows: Rows,
        heads: _Heads,
        step: PagedStep,
        segments: Sequence[Segment],
    ) -> None:
        """Attend for rows of prefill, whose heads lie in the room."""
        queries, seen, taken = heads.room.split(
            (attention.heads, attention.kv_heads, attention.kv_heads)
        )
        for segment in segments:
            part = slice(segment.start - step.decode_rows, segment.stop - step.decode_rows)
            own = queries[:, part], seen[:, part], taken[:, part]
            attended = step.prefill(*own, attention.index, segment, step, attention.scaling)
            rows.attended[segment.start : segment.stop].view(
                -1, attention.heads, attention.head_dim
            ).copy_(attended.transpose(0, 1))

    def _feed_forward(self, layer: _Layer, rows: Rows, following: Norm) -> None:
        """Run the rest of a layer, from the attended rows to the norms that the following layer takes."""
        for block in rows.blocks:
            self._add_norm_block(block, layer.output(block.attended), layer.middle)
            gate, up = layer.gate(block.normed), layer.up(block.normed)
            many = self._many(gate.numel(), PARALLEL_VALUES_MIN)
            activate = cpu_kernels.activate_parallel if many else cpu_kernels.activate
            activate(gate.data_ptr(), up.data_ptr(), *gate.shape)
            self._add_norm_block(block, layer.down(gate), following)

    def _add_norm(self, rows: Rows, delta: torch.Tensor | None, norm: Norm) -> None:
        for block in rows.blocks:
            self._add_norm_block(block, delta, norm)

    def _add_norm_block(self, block: Block, delta: torch.Tensor | None, norm: Norm) -> None:
        """Write the norms of a block's rows, to which `delta` is added before."""
        many = self._many(block.rows * norm.width, PARALLEL_VALUES_MIN)
        (cpu_kernels.add_norm_parallel if many else cpu_kernels.add_norm)(
            block.hidden_at,
            0 if delta is None else delta.data_ptr(),
            norm.weight,
            norm.width,
            norm.eps,
            block.normed_at,
            block.rows,
        )

    def _many(self, values: int, least: int) -> bool:
        return self._threads > 1 and values >= least


def _layer_of(layer: Any) -> _Layer:
    attention: FusedAttention = layer.self_attn
    return _Layer(
        qkv=product_of(attention.qkv_proj),
        output=product_of(attention.o_proj),
        gate=product_of(layer.mlp.gate_proj),
        up=product_of(layer.mlp.up_proj),
        down=product_of(layer.mlp.down_proj),
        norm=Norm.of(layer.input_layernorm),
        middle=Norm.of(layer.post_attention_layernorm),
        query_weight=_values_of(attention.q_norm),
        key_weight=_values_of(attention.k_norm),
        head_eps=np.float32(getattr(attention.q_norm, "variance_epsilon", 0.0)),
        attention=attention,
    )


def _ends(step: PagedStep, wanted: npt.NDArray[np.int64]) -> list[Segment]:
    """Return the last rows of chunks that are wanted. No other rows of a chunk ever are: they yield no token."""
    rows = set(wanted[step.decode_rows :].tolist())
    return [segment.end() for segment in step.segments if segment.stop - 1 in rows]


def product_of(module: nn.Module) -> Product:
    """Return what multiplies by a packed linear layer, without the call of a module where there is no need of one."""
    if isinstance(module, PackedLinear):
        return module.packed
    forward: Product = module.forward
    return forward


def _values_of(norm: Any) -> Halves:
    """Return the weights of a norm; none where there is no norm."""
    if norm is None:
        return np.empty(0, dtype=np.uint16)
    found: Halves = norm.weight.detach().view(torch.uint16).numpy()
    return found
