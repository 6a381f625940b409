"""A step's rows through layers of a language model, in one call from Python.

A small model's step is some hundred kernel calls of a few microseconds each, and a call from Python takes as long
again. Here compiled code makes the calls. The kernels of `kernels/` are called by address (`compilation.KernelCall`),
so their results have the same bits as when Python calls them, with one thread or many, and this function compiles
within a second or two.

Arguments that are the same in every step are tables of records: the layers' products, norms and heads. There are
three kinds of products (`Tables`), and a model may have all of them. Each kind has its own kernels, compiled for the
formats of its weights. Formats do not appear in a call: dtype tags select them, arrays whose dtype matters only at
compile time; at run time all tags are passed in the same way.

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

import numba
import numpy as np
import numpy.typing as npt

from vsched_workers.backends.cpu.kernels.bf16 import LOG2_E
from vsched_workers.backends.cpu.kernels.compilation import KernelCall, compiled
from vsched_workers.backends.cpu.kernels.gemm import PANEL, PASS_ROWS
from vsched_workers.backends.cpu.kernels.norm import NORM
from vsched_workers.backends.cpu.kernels.prefill_attention import (
    PARALLEL_SCORES_MIN,
    PrefillArguments,
)
from vsched_workers.backends.cpu.kernels.rope import HEADS, RopeRows, no_rows
from vsched_workers.backends.cpu.quantized.kernel import (
    FEW_ROWS_MAX,
    FLOAT_PRODUCT,
    INT8_PRODUCT,
)

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

PANELS, INT8_ACTIVATIONS, FLOATS = 0, 1, 2
"""Kinds of products, by their kernels.

`PANELS`: `gemm.multiply` or `tiles.kernel.multiply_in_tiles`. `INT8_ACTIVATIONS`: `integers.multiply_int8`, optionally
with `quantized.widened.multiply_widened` for many rows. `FLOATS`: `quantized.kernel.multiply`.
"""

PRODUCT = np.dtype(
    [("kind", np.int64), ("place", np.int64), ("kernel", np.int64), ("weights", np.int64)]
)
"""A product: its kind, its index in the table of its kind, the index of its kernels' addresses, its number of
weights.
"""

PANEL_PRODUCT = np.dtype(
    [
        ("pairs", np.int64),
        ("weight_at", np.int64),
        ("outputs", np.int64),
        ("bias_at", np.int64),
    ]
)
"""Arguments of `gemm.multiply` and `tiles.kernel.multiply_in_tiles`."""

PRODUCTS = QKV, O_PROJ, GATE, UP, DOWN = 0, 1, 2, 3, 4
"""Products of a layer, by their column in the table."""

NORMS = INPUT_LAYERNORM, ATTENTION_OUTPUT_NORM, POST_ATTENTION_LAYERNORM, MLP_OUTPUT_NORM = (
    0,
    1,
    2,
    3,
)
"""Norms of a layer, by their index among its norms. The norm of the model follows those of the last layer."""

KERNELS = ADD_NORM, NORM_PARTS, ACTIVATION, DECODE, ROPE, ATTEND = 0, 1, 2, 3, 4, 5
"""Kernels other than products, by their index in the table of addresses."""

FEW, MANY, MANY_MIN = 0, 1, 2
"""Columns of `Tables.multiply`: kernels for few and for many rows, and the minimum of many."""

ALONE_MAX = 1 << 18
"""Products of fewer weights, times passes, run on one thread: waking another takes as long as 2^17 weights."""

_LONG, _SINGLE = numba.int64, numba.float32
_NORMS = numba.typeof(np.empty(1, dtype=NORM))
_INT8_WEIGHT = numba.typeof(np.empty(1, dtype=INT8_PRODUCT))
_FLOAT_WEIGHT = numba.typeof(np.empty(1, dtype=FLOAT_PRODUCT))

CALL_ADD_NORM = KernelCall(_LONG, _LONG, _LONG, _LONG, _LONG, _SINGLE, _LONG, _LONG)
CALL_ADD_NORMED = KernelCall(_LONG, _LONG, _LONG, _NORMS, _SINGLE, _NORMS, _LONG, _LONG, _LONG)
CALL_NORM_PARTS = KernelCall(_LONG, _LONG, _LONG, _LONG, _NORMS, _LONG)
CALL_PANELS = KernelCall(*[_LONG] * 8)
CALL_INT8 = KernelCall(_LONG, None, None, None, None, _INT8_WEIGHT, *[_LONG] * 4)
CALL_FLOATS = KernelCall(_LONG, None, None, None, _LONG, _FLOAT_WEIGHT, *[_LONG] * 4)
CALL_ACTIVATION = KernelCall(*[_LONG] * 5)
CALL_DECODE = KernelCall(
    _LONG,
    _LONG,
    _LONG,
    numba.typeof(np.empty(1, dtype=HEADS)),
    numba.typeof(no_rows()),
    None,
    None,
    numba.typeof(np.empty((1, 1), dtype=np.int32)),
    numba.typeof(np.empty(1, dtype=np.int32)),
    _LONG,
    _LONG,
)
CALL_ROPE = KernelCall(
    *[_LONG] * 4,
    numba.typeof(np.empty(1, dtype=HEADS)),
    numba.typeof(no_rows()),
    None,
    None,
)
CALL_ATTEND = KernelCall(_LONG, None)
_add_norm, _add_normed = CALL_ADD_NORM.call, CALL_ADD_NORMED.call
_norm_parts, _multiply_panels = CALL_NORM_PARTS.call, CALL_PANELS.call
_multiply_int8, _multiply_floats = CALL_INT8.call, CALL_FLOATS.call
_activate, _decode = CALL_ACTIVATION.call, CALL_DECODE.call
_rope, _attend = CALL_ROPE.call, CALL_ATTEND.call


class Tables(NamedTuple):
    """Arguments that are the same in every step.

    Attributes:
        model: `MODEL`, [1].
        products: `PRODUCT`, [layers, 5], in the order of `PRODUCTS`.
        multiply: Addresses of kernels for few and for many rows, and the minimum of many, int64 [formats, 3].
        panel_products: `PANEL_PRODUCT`: bfloat16 weights, on processors that multiply bfloat16.
        int8_products: `INT8_PRODUCT`: int8 and int4 weights with int8 activations.
        float_products: `FLOAT_PRODUCT`: weights that are dequantized or widened.
        norms: `NORM`, [4 * layers + 1], in the order of `NORMS`.
        head_norms: `NORM`, [2 * layers]: norms over all query heads, and over all key heads.
        heads: `HEADS`, [layers].
        places: Index of the kind of each layer, and of the layer in the cache, int64 [layers, 2].
    """

    model: npt.NDArray[Any]
    products: npt.NDArray[Any]
    multiply: npt.NDArray[np.int64]
    panel_products: npt.NDArray[Any]
    int8_products: npt.NDArray[Any]
    float_products: npt.NDArray[Any]
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


def _pointing(_context: Any, _address: Any, like: Any) -> Any:
    """Emit the conversion of an address to a pointer to values of the dtype of `like`."""
    pointer = numba.types.CPointer(like.dtype)

    def point(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(pointer))

    return pointer(numba.intp, like), point


_pointer_to: Any = numba.extending.intrinsic(_pointing)


@compiled()
def _array_at(address: int, like: Any) -> Any:
    """View memory at an address as an array with the shape and dtype of another."""
    return numba.carray(_pointer_to(address, like), like.shape)  # type: ignore[attr-defined]  # it has no stub


@compiled()
def _product(tag: Any, tables: Tables, place: Any, rows_at: int, rows: int, out_at: int) -> None:
    """Multiply rows by one of a layer's products."""
    product = tables.products[place[0], place[1]]
    passes = (rows + PASS_ROWS - 1) // PASS_ROWS
    many = rows >= tables.multiply[product.kernel, MANY_MIN]
    kernel = tables.multiply[product.kernel, MANY if many else FEW]
    pool = 0 if product.weights * passes < ALONE_MAX else tables.model[0].pool
    if product.kind == PANELS:
        panels = tables.panel_products[product.place]
        _multiply_panels(
            kernel, pool, rows_at, rows, panels.pairs, panels.weight_at,
            panels.outputs, panels.bias_at, out_at,
        )  # fmt: skip
    elif product.kind == INT8_ACTIVATIONS:
        int8 = tables.int8_products[product.place : product.place + 1]
        outputs = int8[0].outputs
        _multiply_int8(kernel, pool, tag, tag, tag, tag, int8, rows_at, rows, outputs, out_at)
    else:
        floats = tables.float_products[product.place : product.place + 1]
        outputs, widens = floats[0].outputs, 1 if rows > FEW_ROWS_MAX else 0
        _multiply_floats(
            kernel, pool, tag, tag, tag, widens, floats, rows_at, rows, outputs, out_at
        )


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
        unseen = max(position + 1 - heads.window, 0) if heads.window else 0
        seen = chunks.slots[begin + unseen : begin + position + stop - first]
        padded_keys = (len(seen) + PANEL - 1) // PANEL * PANEL
        given = PrefillArguments(
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
            seen,
            chunks.packed_at,
            padded_keys,
            1,
            heads.window,
            heads.scaling * LOG2_E,
            heads.softcap * LOG2_E,
            at.attended + (decoding + first) * 2 * model.queries,
            chunks.tag,
        )
        scores = (stop - first) * heads.queries * padded_keys
        _attend(kernels[ATTEND], chunks.pool if scores >= PARALLEL_SCORES_MIN else 0, given)


@compiled()
def run_layers(
    kernels: Any,
    tag: Any,
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
        tag: Dtype tag of rows, `BF16`, which stands for all tags of products.
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
        _product(tag, tables, (layer, QKV), at.normed, count, at.wide)
        if model.norms_all_heads:
            _norm_heads(kernels, tables, layer, at.wide, count)
        kind, place = tables.places[layer, 0], tables.places[layer, 1]
        keys, values = _array_at(kept_at[place, 0], kept), _array_at(kept_at[place, 1], kept)
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
        norm = len(NORMS) * layer
        _product(tag, tables, (layer, O_PROJ), at.attended, count, at.other)
        _add_residual(
            kernels,
            tables,
            at,
            count,
            at.other,
            norm + ATTENTION_OUTPUT_NORM,
            norm + POST_ATTENTION_LAYERNORM,
        )
        _product(tag, tables, (layer, GATE), at.normed, count, at.wide)
        _product(tag, tables, (layer, UP), at.normed, count, at.other)
        _activate(kernels[ACTIVATION], model.pool, at.wide, at.other, count, model.inner)
        _product(tag, tables, (layer, DOWN), at.wide, count, at.other)
        _add_residual(
            kernels, tables, at, count, at.other, norm + MLP_OUTPUT_NORM, norm + len(NORMS)
        )
