"""Rotary position embedding of bfloat16 heads, their norms, and writes of keys and values into the KV cache.

A head (x, y) of two halves, at the angles t of its row's position, becomes

    (x cos t - y sin t,  y cos t + x sin t)

after an RMS norm (see `norm.py`) if the model has one. Language models round each product before the sum, as
transformers' modules do in bfloat16; vision towers compute in float32 and round the result.

All kernels read the merged QKV product and write the layout of their attention kernel.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from vsched.types import KV_SCALE_BYTES
from vsched_workers.backends.cpu.kernels.bf16 import (
    bf16_array,
    copy,
    float32_array,
    maximum,
    narrow,
    through_bf16,
    widen,
)
from vsched_workers.backends.cpu.kernels.compilation import LONG, array_of, compiled, kernel
from vsched_workers.backends.cpu.kernels.thread_pool import rows_together, spread
from vsched_workers.batching.kv_cache import LEVELS, SCALE_MIN

Bf16Array = npt.NDArray[np.uint16]

HEADS = np.dtype(
    [
        ("queries", np.int64),
        ("query_norm_at", np.int64),
        ("key_norm_at", np.int64),
        ("norm_eps", np.float32),
        ("norm_once", np.int64),
        ("scaling", np.float32),
        ("softcap", np.float32),
        ("window", np.int64),
    ]
)
"""Attributes shared by the heads of a layer, an array of one record (see `heads_of`).

`queries` is the number of query heads. Weights of norms are [head_dim], with address 0 if heads have no norm; they
are bfloat16, or, if `norm_once` is 1, float32, and only the result is rounded. Scores are multiplied by `scaling`,
then soft-capped at `softcap`, unless that is 0. A row sees `window` tokens, itself included; 0 for all.
"""


def heads_of(
    queries: int,
    query_norm_at: int,
    key_norm_at: int,
    norm_eps: float,
    scaling: float,
    *,
    norm_once: bool = False,
    softcap: float | None = None,
    window: int | None = None,
) -> npt.NDArray[Any]:
    """Return the record of a layer's heads; memory at the addresses must outlive it."""
    record = (
        queries,
        query_norm_at,
        key_norm_at,
        norm_eps,
        int(norm_once),
        scaling,
        softcap or 0.0,
        window or 0,
    )
    return np.array([record], dtype=HEADS)


class RopeRows(NamedTuple):
    """Positions of some rows of a step.

    Attributes:
        cos: bfloat16 [rows, head_dim / 2], cosines of the angles of a row's position.
        sin: Sines, likewise.
        slots: int64 [rows], the cache slot for a row's key and value.
    """

    cos: Bf16Array
    sin: Bf16Array
    slots: npt.NDArray[np.int64]


_ANGLES_TYPE = array_of(np.uint16, 2)
HEADS_TYPE = array_of(HEADS)
ROWS_TYPE = numba.types.NamedTuple([_ANGLES_TYPE, _ANGLES_TYPE, array_of(np.int64)], RopeRows)


@compiled()
def _norm_head(source_at: int, target_at: int, half: int, norm_at: int, heads: Any) -> None:
    """Write the norm of one head, in two halves."""
    lower, upper = bf16_array(source_at, half), bf16_array(source_at + 2 * half, half)
    lower_out, upper_out = bf16_array(target_at, half), bf16_array(target_at + 2 * half, half)
    squares = np.float32(0.0)
    for index in range(half):
        first, second = widen(lower[index]), widen(upper[index])
        squares += first * first + second * second
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(2 * half) + heads.norm_eps)
    if heads.norm_once:
        lower_single, upper_single = (
            float32_array(norm_at, half),
            float32_array(norm_at + 4 * half, half),
        )
        for index in range(half):
            lower_out[index] = narrow(lower_single[index] * (widen(lower[index]) * scale))
            upper_out[index] = narrow(upper_single[index] * (widen(upper[index]) * scale))
        return
    lower_weight, upper_weight = bf16_array(norm_at, half), bf16_array(norm_at + 2 * half, half)
    for index in range(half):
        first = through_bf16(widen(lower[index]) * scale)
        lower_out[index] = narrow(widen(lower_weight[index]) * first)
        second = through_bf16(widen(upper[index]) * scale)
        upper_out[index] = narrow(widen(upper_weight[index]) * second)


@compiled()
def rope_head(
    source_at: int, target_at: int, rows: RopeRows, row: int, norm_at: int, heads: Any
) -> None:
    """Write one head of a row, normed if `norm_at` is not 0, and rotated; `heads` is the layer's record."""
    half = rows.cos.shape[1]
    # Two arrays each: numba does not recognize the sum of an index and an offset as non-negative.
    lower, upper = bf16_array(source_at, half), bf16_array(source_at + 2 * half, half)
    lower_out, upper_out = bf16_array(target_at, half), bf16_array(target_at + 2 * half, half)
    if norm_at:
        _norm_head(source_at, target_at, half, norm_at, heads)
        lower, upper = lower_out, upper_out
    for index in range(half):
        first, second = widen(lower[index]), widen(upper[index])
        cos, sin = widen(rows.cos[row, index]), widen(rows.sin[row, index])
        lower_out[index] = narrow(through_bf16(first * cos) - through_bf16(second * sin))
        upper_out[index] = narrow(through_bf16(second * cos) + through_bf16(first * sin))


def write_head(head_at: int, cached: Any, slot: int, kv_head: int) -> None:
    """Write a bfloat16 head to its cache slot; the memory at the address becomes the value read back from the cache."""
    raise NotImplementedError


@numba.extending.overload(write_head, inline="always")
def _choose_write(head_at: Any, cached: Any, slot: Any, kv_head: Any) -> Any:
    chosen = _write_int8 if cached.dtype == numba.int8 else _write_bf16

    def keep(head_at: Any, cached: Any, slot: Any, kv_head: Any) -> None:
        chosen(head_at, cached, slot, kv_head)

    return keep


@compiled()
def _write_bf16(head_at: int, cached: Any, slot: int, kv_head: int) -> None:
    _, kv_heads, head_dim = cached.shape
    copy(head_at, cached.ctypes.data + (slot * kv_heads + kv_head) * 2 * head_dim, head_dim)


@compiled()
def _write_int8(head_at: int, cached: Any, slot: int, kv_head: int) -> None:
    """Same result to the bit as the torch version in `batching/kv_cache.py`."""
    _, kv_heads, width = cached.shape
    head_dim = width - KV_SCALE_BYTES
    head = bf16_array(head_at, head_dim)
    largest = np.float32(0.0)
    for index in range(head_dim):
        largest = maximum(largest, np.abs(widen(head[index])))
    scale = through_bf16(largest * np.float32(1 / LEVELS))
    at = cached.ctypes.data + (slot * kv_heads + kv_head) * width + head_dim
    bf16_array(at, 1)[0] = narrow(scale)
    inverse = np.float32(0.0) if scale < np.float32(SCALE_MIN) else np.float32(1.0) / scale
    highest = np.float32(LEVELS)
    for index in range(head_dim):
        level = np.rint(widen(head[index]) * inverse)
        level = min(max(level, -highest), highest)
        cached[slot, kv_head, index] = np.int8(level)
        head[index] = narrow(level * scale)


@compiled()
def _rope_row(
    row: int,
    qkv_at: int,
    out_at: int,
    out_rows: int,
    layer_heads: Any,
    rows: RopeRows,
    keys: Any,
    values: Any,
) -> None:
    heads = layer_heads[0]
    kv_heads, head_dim = keys.shape[1], 2 * rows.cos.shape[1]
    query_heads, size = heads.queries, 2 * head_dim
    head_bytes = out_rows * size
    source_at = qkv_at + row * (query_heads + 2 * kv_heads) * size
    target_at = out_at + row * size
    for head in range(query_heads):
        to = target_at + head * head_bytes
        rope_head(source_at + head * size, to, rows, row, heads.query_norm_at, heads)
    source_at += query_heads * size
    target_at += query_heads * head_bytes
    for head in range(kv_heads):
        to = target_at + head * head_bytes
        rope_head(source_at + head * size, to, rows, row, heads.key_norm_at, heads)
        write_head(to, keys, rows.slots[row], head)
        to += kv_heads * head_bytes
        copy(source_at + (kv_heads + head) * size, to, head_dim)
        write_head(to, values, rows.slots[row], head)


@kernel(*[LONG] * 4, HEADS_TYPE, ROWS_TYPE, None, None)
def rope_prefill(
    pool: int,
    qkv_at: int,
    out_at: int,
    out_rows: int,
    heads: Any,
    rows: RopeRows,
    keys: Any,
    values: Any,
) -> None:
    """Write the heads of prefill rows to `out`, and keys and values to their cache slots as well.

    Shape: qkv [rows, heads + 2 * kv heads, head_dim]; out [heads + 2 * kv heads, out_rows, head_dim], with `out_at`
    the address of the first of these rows; keys, values [slots, kv heads, width of a head]; `heads` as of `heads_of`.
    """
    width = (heads[0].queries + 2 * keys.shape[1]) * 2 * rows.cos.shape[1]
    arguments = qkv_at, out_at, out_rows, heads, rows, keys, values
    spread(pool, len(rows.slots), rows_together(width), _rope_row, arguments)


@compiled()
def _rope_patch(
    piece: int, qkv_at: int, first: int, heads: int, cos: Any, sin: Any, out_dim: int, out_at: int
) -> None:
    row, (rows, half) = first + piece, cos.shape
    size, padding = 4 * half, out_dim - 2 * half
    for head in range(3 * heads):
        target_at = out_at + (head * rows + row) * 2 * out_dim
        bf16_array(target_at + size, padding)[:] = np.uint16(0)
    for head in range(2 * heads):
        source_at = qkv_at + (row * 3 * heads + head) * size
        target_at = out_at + (head * rows + row) * 2 * out_dim
        lower, upper = bf16_array(source_at, half), bf16_array(source_at + 2 * half, half)
        lower_out, upper_out = bf16_array(target_at, half), bf16_array(target_at + 2 * half, half)
        for index in range(half):
            first, second = widen(lower[index]), widen(upper[index])
            lower_out[index] = narrow(first * cos[row, index] - second * sin[row, index])
            upper_out[index] = narrow(second * cos[row, index] + first * sin[row, index])
    for head in range(2 * heads, 3 * heads):
        source_at = qkv_at + (row * 3 * heads + head) * size
        copy(source_at, out_at + (head * rows + row) * 2 * out_dim, 2 * half)


@kernel(*[LONG] * 5, array_of(np.float32, 2), array_of(np.float32, 2), LONG, LONG)
def rope_patches(
    pool: int,
    qkv_at: int,
    first: int,
    stop: int,
    heads: int,
    cos: Any,
    sin: Any,
    out_dim: int,
    out_at: int,
) -> None:
    """Write the heads of the rows `first` to `stop` of an image, with queries and keys rotated in float32.

    Shape: qkv [rows, 3 * heads, head_dim], with `qkv_at` the address that row 0 would have; cos, sin float32 [rows,
    head_dim / 2]; out [3 * heads, rows, out_dim], heads padded with zeros.
    """
    arguments = qkv_at, first, heads, cos, sin, out_dim, out_at
    spread(pool, stop - first, rows_together(6 * heads * cos.shape[1]), _rope_patch, arguments)
