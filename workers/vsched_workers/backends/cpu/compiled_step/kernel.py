"""A step's rows through layers of a language model, in one call from Python.

A small model's step is some hundred kernel calls of a few microseconds each, and a call from Python takes as long
again. Here compiled code makes the calls. The kernels of `kernels/` are called by address (`compilation.kernel`),
so their results have the same bits as when Python calls them, with one thread or many, and this function compiles
within a second or two. A decode step of tiny25 takes 359 us on one thread instead of 589. Rejected: calls by name, with
which numba compiles each kernel again into this function (half a minute per combination of types); one parallel region
with barriers, at which threads spin while another process has the core.

Arguments that are the same in every step are tables of records: the layers' products, norms and heads. Products may
have different kernels, compiled for the formats of their weights. Formats do not appear in a call: dtype tags select
them, arrays whose dtype matters only at compile time; at run time all tags are passed in the same way.

  for each layer:

      hidden -> input_layernorm -> normed
      normed -> qkv -> wide -> rotary embedding, cache write, attention -> attended
                               (decode rows first, then each chunk)
      attended -> o_proj -> other;  hidden += other -> post_attention_layernorm -> normed
      normed -> gate -> wide;  normed -> up -> other
      wide = act(wide) * other -> down -> other;  hidden += other -> input_layernorm of the next layer
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vsched_workers.backends.cpu.kernels import gemm
from vsched_workers.backends.cpu.kernels.activation import swiglu
from vsched_workers.backends.cpu.kernels.bf16 import LOG2_E, array_like
from vsched_workers.backends.cpu.kernels.compilation import compiled
from vsched_workers.backends.cpu.kernels.decode_attention import decode
from vsched_workers.backends.cpu.kernels.gemm import PANEL, PASS_ROWS
from vsched_workers.backends.cpu.kernels.norm import add_norm, add_normed, norm_parts
from vsched_workers.backends.cpu.kernels.prefill_attention import (
    PARALLEL_SCORES_MIN,
    PrefillArguments,
    attend,
)
from vsched_workers.backends.cpu.kernels.rope import RopeRows, rope_prefill

MODEL = np.dtype(
    [
        ("hidden", np.int64),
        ("inner", np.int64),
        ("queries", np.int64),
        ("keys", np.int64),
        ("adds_plainly", np.int64),
        ("norms_all_heads", np.int64),
        ("factor", np.float32),
        ("pool", np.int64),
    ]
)
"""Attributes shared by the layers of a model, an array of one record.

`hidden`, `inner`, `queries` and `keys` are values of a row: of the hidden states, of the gate, of all query heads and
of all key heads. `adds_plainly`, `norms_all_heads` and `factor` (of the residual) are those of `Decoder`. `pool` is
the address of the thread pool's state.
"""

PRODUCTS = QKV, O_PROJ, GATE, UP, DOWN = 0, 1, 2, 3, 4
"""Products of a layer, by their column in the table."""

NORMS = (0, 1, 2, 3)
INPUT_LAYERNORM, ATTENTION_OUTPUT_NORM, POST_ATTENTION_LAYERNORM, MLP_OUTPUT_NORM = NORMS
"""Norms of a layer, by their index among its norms. The norm of the model follows those of the last layer."""

KERNELS = ADD_NORM, NORM_PARTS, ACTIVATION, DECODE, ROPE, ATTEND = 0, 1, 2, 3, 4, 5
"""Kernels other than products, by their index in the table of addresses."""

FEW, MANY, MANY_MIN = 0, 1, 2
"""Columns of `Tables.multiply`."""

ALONE_MAX = 1 << 18
"""Products of fewer weights, times passes, run on one thread: waking another takes as long as 2^17 weights."""

_add_norm, _add_normed, _norm_parts = add_norm.call, add_normed.call, norm_parts.call
_multiply, _activate = gemm.multiply.call, swiglu.call
_decode, _rope, _attend = decode.call, rope_prefill.call, attend.call


class Tables(NamedTuple):
    """Arguments that are the same in every step.

    Attributes:
        model: `MODEL`, [1].
        weights: `WEIGHT`, [5 * layers], in the order of `PRODUCTS`.
        multiply: Addresses of their kernels for few and for many rows, and the minimum of many, int64 [5 * layers, 3].
        norms: `NORM`, [4 * layers + 1], in the order of `NORMS`.
        head_norms: `NORM`, [2 * layers]: norms over all query heads, and over all key heads.
        heads: `HEADS`, [layers].
        places: Index of the kind of each layer, and of the layer in the cache, int64 [layers, 2].
    """

    model: npt.NDArray[Any]
    weights: npt.NDArray[Any]
    multiply: npt.NDArray[np.int64]
    norms: npt.NDArray[Any]
    head_norms: npt.NDArray[Any]
    heads: npt.NDArray[Any]
    places: npt.NDArray[np.int64]


class Chunks(NamedTuple):
    """Prefill rows of a step, in chunks: the rows after the decode rows.

    Attributes:
        bounds: For each chunk its first row, one past its last row, both counted from the first prefill row, the
            position of its first row, and the start of its slots in `slots`, int64 [chunks, 4].
        slots: Cache slots of the contexts of all chunks, int64.
        heads_at: Address of a buffer for the heads, bfloat16 [heads + 2 * kv heads, prefill rows, head_dim].
        packed_at: Address of a buffer for the packed keys and values of the longest context.
        pool: Address of the state of the attention's threads.
        tag: Dtype tag of the attention's operands.
    """

    bounds: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    heads_at: int
    packed_at: int
    pool: int
    tag: npt.NDArray[Any]


class PackedRows(NamedTuple):
    """Rows of a step: decode rows, then prefill rows.

    Attributes:
        cos: Cosines of the angles of each row, for each kind of layers, bfloat16 [kinds, rows, head_dim / 2].
        sin: Sines, likewise.
        slots: Cache slot for each row's key and value, int64 [rows].
        tables: Block tables of decode rows, int32 [decode rows, blocks].
        contexts: Tokens that a decode row attends to, int32 [decode rows].
        shares: See `decode_attention.decode`.
        pool: Address of the state of the threads of decode attention; 0 for the calling thread.
        chunks: Prefill rows.
    """

    cos: npt.NDArray[np.uint16]
    sin: npt.NDArray[np.uint16]
    slots: npt.NDArray[np.int64]
    tables: npt.NDArray[np.int32]
    contexts: npt.NDArray[np.int32]
    shares: int
    pool: int
    chunks: Chunks


class Places(NamedTuple):
    """Addresses of bfloat16 buffers.

    Attributes:
        hidden: Hidden states, [rows, hidden].
        normed: Their norms, same shape.
        attended: Attention output, [rows, queries].
        wide: QKV, later the gate: [rows, maximum of both].
        other: Output of `up`, or the residual to add: [rows, maximum of both].
    """

    hidden: int
    normed: int
    attended: int
    wide: int
    other: int


@compiled()
def _product(tags: Any, tables: Tables, index: int, rows_at: int, rows: int, out_at: int) -> None:
    """Multiply rows by one of the products."""
    weight, kernels = tables.weights[index : index + 1], tables.multiply[index]
    kernel = kernels[MANY if rows >= kernels[MANY_MIN] else FEW]
    outputs, passes = weight[0].outputs, (rows + PASS_ROWS - 1) // PASS_ROWS
    pool = 0 if outputs * weight[0].inputs_unpadded * passes < ALONE_MAX else tables.model[0].pool
    _multiply(kernel, pool, tags, weight, rows_at, rows, outputs, out_at)


@compiled()
def _add_residual(
    kernels: Any, tables: Tables, at: Places, rows: int, delta_at: int, added: int, norm: int
) -> None:
    """Add `delta_at`, normed by the norm `added`, to the hidden states, and write their norms by the norm `norm`."""
    model, norms = tables.model[0], tables.norms
    if model.adds_plainly:
        _add_norm(
            kernels[ADD_NORM],
            model.pool,
            at.hidden,
            delta_at,
            norms[norm].weight_at,
            model.hidden,
            norms[norm].eps,
            at.normed,
            rows,
        )
    else:
        _add_normed(
            kernels[ADD_NORM],
            model.pool,
            at.hidden,
            delta_at,
            norms[added : added + 1],
            model.factor,
            norms[norm : norm + 1],
            model.hidden,
            at.normed,
            rows,
        )


@compiled()
def _norm_heads(kernels: Any, tables: Tables, layer: int, qkv_at: int, rows: int) -> None:
    """Norm the queries of each row, all heads at once, and the keys."""
    model = tables.model[0]
    row_bytes = 2 * (model.queries + 2 * model.keys)
    norms, place = tables.head_norms, 2 * layer
    _norm_parts(
        kernels[NORM_PARTS],
        model.pool,
        qkv_at,
        row_bytes,
        model.queries,
        norms[place : place + 1],
        rows,
    )
    keys_at = qkv_at + 2 * model.queries
    _norm_parts(
        kernels[NORM_PARTS],
        model.pool,
        keys_at,
        row_bytes,
        model.keys,
        norms[place + 1 : place + 2],
        rows,
    )


@compiled()
def _attend_chunks(
    kernels: Any, tables: Tables, layer: int, rows: PackedRows, at: Places, keys: Any, values: Any
) -> None:
    """Rotate the heads of prefill rows, write keys and values to the cache, and attend, chunk by chunk."""
    chunks, heads, model = rows.chunks, tables.heads[layer], tables.model[0]
    decoding, kv_heads, head_dim = len(rows.contexts), keys.shape[1], keys.shape[2]
    prefilling, size, kind = len(rows.slots) - decoding, 2 * head_dim, tables.places[layer, 0]
    turned = RopeRows(rows.cos[kind][decoding:], rows.sin[kind][decoding:], rows.slots[decoding:])
    _rope(
        kernels[ROPE],
        model.pool,
        at.wide + decoding * 2 * (model.queries + 2 * model.keys),
        chunks.heads_at,
        prefilling,
        tables.heads[layer : layer + 1],
        turned,
        keys,
        values,
    )
    for chunk in range(len(chunks.bounds)):
        first, stop = chunks.bounds[chunk, 0], chunks.bounds[chunk, 1]
        position, begin = chunks.bounds[chunk, 2], chunks.bounds[chunk, 3]
        first_visible = max(position + 1 - heads.window, 0) if heads.window else 0
        visible_slots = chunks.slots[begin + first_visible : begin + position + stop - first]
        padded_keys = (len(visible_slots) + PANEL - 1) // PANEL * PANEL
        arguments = PrefillArguments(
            chunks.heads_at + first * size,
            prefilling * size,
            heads.queries,
            1,
            stop - first,
            head_dim,
            keys.ctypes.data,
            values.ctypes.data,
            kv_heads * size,
            size,
            kv_heads,
            visible_slots,
            chunks.packed_at,
            padded_keys,
            1,
            heads.window,
            heads.scaling * LOG2_E,
            heads.softcap * LOG2_E,
            0,
            at.attended + (decoding + first) * 2 * model.queries,
            chunks.tag,
        )
        scores = (stop - first) * heads.queries * padded_keys
        _attend(kernels[ATTEND], chunks.pool if scores >= PARALLEL_SCORES_MIN else 0, arguments)


@compiled()
def run_layers(
    kernels: Any,
    tags: Any,
    tables: Tables,
    rows: PackedRows,
    at: Places,
    kept_at: Any,
    kept: Any,
    block_size: int,
    first: int,
    stop: int,
) -> None:
    """Run rows through the layers `first` to `stop`: from hidden states to the input of the next layer, or final norm.

    Args:
        kernels: Addresses of the kernels, int64, in the order of `KERNELS`.
        tags: Dtype tags, of bfloat16, which stand for those of all products.
        tables: Arguments that are the same in every step.
        rows: Rows of the step.
        at: Addresses of the buffers.
        kept_at: Addresses of each layer's keys and values, int64 [layers, 2].
        kept: An array with the shape and dtype of a layer's key cache.
        block_size: Slots per block.
        first: First layer; unless it is 0, `normed` has its input.
        stop: One past the last layer.
    """
    count, decoding = len(rows.slots), len(rows.contexts)
    model = tables.model[0]
    if first == 0:
        _add_residual(kernels, tables, at, count, 0, 0, 0)
    for layer in range(first, stop):
        product, norm = len(PRODUCTS) * layer, len(NORMS) * layer
        _product(tags, tables, product + QKV, at.normed, count, at.wide)
        if model.norms_all_heads:
            _norm_heads(kernels, tables, layer, at.wide, count)
        kind, place = tables.places[layer, 0], tables.places[layer, 1]
        keys, values = array_like(kept_at[place, 0], kept), array_like(kept_at[place, 1], kept)
        if decoding:
            _decode(
                kernels[DECODE],
                rows.pool,
                at.wide,
                at.attended,
                tables.heads[layer : layer + 1],
                RopeRows(
                    rows.cos[kind][:decoding], rows.sin[kind][:decoding], rows.slots[:decoding]
                ),
                keys,
                values,
                rows.tables,
                rows.contexts,
                block_size,
                rows.shares,
            )
        if decoding < count:
            _attend_chunks(kernels, tables, layer, rows, at, keys, values)
        _product(tags, tables, product + O_PROJ, at.attended, count, at.other)
        _add_residual(
            kernels,
            tables,
            at,
            count,
            at.other,
            norm + ATTENTION_OUTPUT_NORM,
            norm + POST_ATTENTION_LAYERNORM,
        )
        _product(tags, tables, product + GATE, at.normed, count, at.wide)
        _product(tags, tables, product + UP, at.normed, count, at.other)
        _activate(kernels[ACTIVATION], model.pool, at.wide, at.other, count, model.inner)
        _product(tags, tables, product + DOWN, at.wide, count, at.other)
        _add_residual(
            kernels, tables, at, count, at.other, norm + MLP_OUTPUT_NORM, norm + len(NORMS)
        )
