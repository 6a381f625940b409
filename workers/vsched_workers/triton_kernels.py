"""The Triton kernels; imported on CUDA only, where torch brings Triton along."""

# Triton compiles these functions: to a type checker they are untyped.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit
def decode_rows(
    query: Any,
    keys: Any,
    values: Any,
    tables: Any,
    contexts: Any,
    out: Any,
    scaling: Any,
    table_stride: Any,
    kv_heads: Any,
    group: Any,
    head_dim: Any,
    BLOCK_SIZE: tl.constexpr,  # noqa: N803  # Triton's way to mark what is known at compile time
    GROUP: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
) -> None:
    """Attend for the query heads of one row that share one key head.

    Shape: query and out [rows, kv_heads * group, head_dim]; keys and values [slots, kv_heads, head_dim]; tables
    [rows, blocks]; GROUP and HEAD_DIM are group and head_dim, rounded up to powers of two.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    heads = tl.arange(0, GROUP)
    dims = tl.arange(0, HEAD_DIM)
    offsets = tl.arange(0, TOKENS)
    length = tl.load(contexts + row)
    at = ((row * kv_heads + kv_head) * group + heads)[:, None] * head_dim + dims[None, :]
    real = (heads < group)[:, None] & (dims < head_dim)[None, :]
    queries = tl.load(query + at, mask=real, other=0.0)
    highest = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    summed = tl.zeros([GROUP, HEAD_DIM], tl.float32)
    for start in range(0, length, TOKENS):
        position = start + offsets
        seen = position < length
        block = tl.load(tables + row * table_stride + position // BLOCK_SIZE, mask=seen, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        cell = (slot * kv_heads + kv_head)[:, None] * head_dim + dims[None, :]
        held = seen[:, None] & (dims < head_dim)[None, :]
        key = tl.load(keys + cell, mask=held, other=0.0)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scaling
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        faded = tl.exp(highest - higher)
        value = tl.load(values + cell, mask=held, other=0.0)
        total = total * faded + tl.sum(weights, axis=1)
        summed = summed * faded[:, None] + tl.dot(
            weights.to(value.dtype), value, input_precision="ieee"
        )
        highest = higher
    result = summed / total[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=real)
