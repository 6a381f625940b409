"""The Triton kernels; imported on CUDA only, where torch brings Triton along.

A row of a decode step reads its whole context, and a context that one program reads keeps one of a GPU's processors
busy, and all others waiting for it. So a context is read in parts, side by side, and a second kernel puts the parts
together. A part has at least so many tokens as whoever starts the kernel says, and more where a context would have more
parts than were started: so a long context among many short ones is spread over processors, too, and a captured step
serves contexts of any length. The programs of parts that a context does not have end at once.

Prior art: Flash-Decoding (Dao et al., 2023) for the parts, PagedAttention (SOSP 2023) for the block tables.
"""

# Triton compiles these functions: to a type checker they are untyped.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit
def decode_parts(
    query: Any,
    keys: Any,
    values: Any,
    tables: Any,
    contexts: Any,
    summed_parts: Any,
    highest_parts: Any,
    total_parts: Any,
    scaling: Any,
    table_stride: Any,
    kv_heads: Any,
    group: Any,
    head_dim: Any,
    parts: Any,
    part_tokens: Any,
    BLOCK_SIZE: tl.constexpr,  # noqa: N803  # Triton's way to mark what is known at compile time
    GROUP: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
) -> None:
    """Attend to one part of a context for the query heads of one row that share one key head.

    Shape: query [rows, kv_heads * group, head_dim]; keys and values [slots, kv_heads, head_dim]; tables [rows, blocks];
    summed_parts float32 [rows, heads, parts, head_dim]; highest_parts and total_parts float32 [rows, heads, parts].
    GROUP and HEAD_DIM are group and head_dim, rounded up to powers of two; part_tokens is a multiple of TOKENS.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    heads = tl.arange(0, GROUP)
    dims = tl.arange(0, HEAD_DIM)
    offsets = tl.arange(0, TOKENS)
    context = tl.load(contexts + row)
    per_part = tl.maximum(tl.cdiv(tl.cdiv(context, TOKENS), parts) * TOKENS, part_tokens)
    first = part * per_part
    if first >= context:
        return
    length = tl.minimum(context, first + per_part)
    head = (row * kv_heads + kv_head) * group + heads
    real = (heads < group)[:, None] & (dims < head_dim)[None, :]
    queries = tl.load(query + head[:, None] * head_dim + dims[None, :], mask=real, other=0.0)
    highest = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    summed = tl.zeros([GROUP, HEAD_DIM], tl.float32)
    for start in range(first, length, TOKENS):
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
    at = head * parts + part
    tl.store(summed_parts + at[:, None] * head_dim + dims[None, :], summed, mask=real)
    tl.store(highest_parts + at, highest, mask=heads < group)
    tl.store(total_parts + at, total, mask=heads < group)


@triton.jit
def merge_parts(
    contexts: Any,
    summed_parts: Any,
    highest_parts: Any,
    total_parts: Any,
    out: Any,
    heads: Any,
    head_dim: Any,
    parts: Any,
    part_tokens: Any,
    PARTS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
) -> None:
    """Put together what the parts of a context gave for one query head of one row, those that it has.

    Shape: as in `decode_parts`; out [rows, heads, head_dim]; a program for each row and head.
    """
    head = tl.program_id(0)
    part = tl.arange(0, PARTS)
    dims = tl.arange(0, HEAD_DIM)
    context = tl.load(contexts + head // heads)
    per_part = tl.maximum(tl.cdiv(tl.cdiv(context, TOKENS), parts) * TOKENS, part_tokens)
    there = part * per_part < context
    highest = tl.load(highest_parts + head * parts + part, mask=there, other=-float("inf"))
    weights = tl.exp(highest - tl.max(highest, axis=0))
    total = tl.load(total_parts + head * parts + part, mask=there, other=0.0)
    cells = (head * parts + part)[:, None] * head_dim + dims[None, :]
    held = there[:, None] & (dims < head_dim)[None, :]
    summed = tl.load(summed_parts + cells, mask=held, other=0.0)
    result = tl.sum(summed * weights[:, None], axis=0) / tl.sum(total * weights, axis=0)
    tl.store(out + head * head_dim + dims, result.to(out.dtype.element_ty), mask=dims < head_dim)
