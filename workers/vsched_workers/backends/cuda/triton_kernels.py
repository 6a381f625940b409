"""The Triton kernels of decode attention; imported on CUDA only, where torch includes Triton.

A row of a decode step reads its whole context, and a context that is read by one program keeps one SM busy while all
others wait for it. So a context is read in parallel parts, and a second kernel reduces them. A part has at least
`part_tokens` tokens, and more if the context would have more parts than were launched: so a long context among many
short ones is spread over SMs, too, and a captured step serves contexts of any length. Programs for parts beyond the
context's end return at once.

Prior art: Flash-Decoding (Dao et al., 2023) for the parts, PagedAttention (SOSP 2023) for the block tables.
"""

# Triton compiles these functions: to a type checker they are untyped, and an annotation other than Triton's own is a
# global variable that no kernel may read.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: ANN001

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit
def decode_parts(
    query,
    keys,
    values,
    tables,
    contexts,
    summed_parts,
    highest_parts,
    total_parts,
    scaling,
    window,
    softcap,
    table_stride,
    parts,
    part_tokens,
    BLOCK_SIZE: tl.constexpr,  # noqa: N803  # Triton's marker of compile-time constants
    KV_HEADS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    GROUP_ROWS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    DIMS: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    VALUE_DIMS: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    WINDOWED: tl.constexpr,  # noqa: N803
    CAPPED: tl.constexpr,  # noqa: N803
) -> None:
    """Attend to one part of a context for the query heads of one row that share one key head.

    Shape: query [rows, KV_HEADS * GROUP, HEAD_DIM]; keys [slots, KV_HEADS, HEAD_DIM]; values [slots, KV_HEADS,
    VALUE_DIM]; tables [rows, blocks]; summed_parts float32 [rows, heads, parts, VALUE_DIM]; highest_parts and
    total_parts float32 [rows, heads, parts]. GROUP_ROWS, DIMS and VALUE_DIMS are GROUP, HEAD_DIM and VALUE_DIM, rounded
    up to powers of two; part_tokens is a multiple of TOKENS.

    If WINDOWED, the context is its last `window` tokens; if CAPPED, scores are bounded by `softcap`.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    heads = tl.arange(0, GROUP_ROWS)
    dims = tl.arange(0, DIMS)
    value_dims = tl.arange(0, VALUE_DIMS)
    offsets = tl.arange(0, TOKENS)
    context = tl.load(contexts + row)
    start_of_all = 0
    if WINDOWED:
        start_of_all = tl.maximum(context - window, 0)
    tiles = tl.cdiv(context - start_of_all, TOKENS)
    per_part = tl.maximum(tl.cdiv(tiles, parts) * TOKENS, part_tokens)
    first = start_of_all + part * per_part
    if first >= context:
        return
    length = tl.minimum(context, first + per_part)
    head = (row * KV_HEADS + kv_head) * GROUP + heads
    real = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(query + head[:, None] * HEAD_DIM + dims[None, :], mask=real, other=0.0)
    highest = tl.full([GROUP_ROWS], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    summed = tl.zeros([GROUP_ROWS, VALUE_DIMS], tl.float32)
    for start in range(first, length, TOKENS):
        position = start + offsets
        seen = position < length
        block = tl.load(tables + row * table_stride + position // BLOCK_SIZE, mask=seen, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        cell = (slot * KV_HEADS + kv_head)[:, None]
        held = seen[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(keys + cell * HEAD_DIM + dims[None, :], mask=held, other=0.0)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scaling
        if CAPPED:  # tanh by the sigmoid
            scores = (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0) * softcap
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        faded = tl.exp(highest - higher)
        kept = seen[:, None] & (value_dims < VALUE_DIM)[None, :]
        value = tl.load(values + cell * VALUE_DIM + value_dims[None, :], mask=kept, other=0.0)
        total = total * faded + tl.sum(weights, axis=1)
        summed = summed * faded[:, None] + tl.dot(
            weights.to(value.dtype), value, input_precision="ieee"
        )
        highest = higher
    at = head * parts + part
    written = (heads < GROUP)[:, None] & (value_dims < VALUE_DIM)[None, :]
    tl.store(summed_parts + at[:, None] * VALUE_DIM + value_dims[None, :], summed, mask=written)
    tl.store(highest_parts + at, highest, mask=heads < GROUP)
    tl.store(total_parts + at, total, mask=heads < GROUP)


@triton.jit
def merge_parts(
    contexts,
    summed_parts,
    highest_parts,
    total_parts,
    sinks,
    out,
    window,
    heads,
    parts,
    part_tokens,
    PARTS: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    VALUE_DIMS: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    WINDOWED: tl.constexpr,  # noqa: N803
    HAS_SINKS: tl.constexpr,  # noqa: N803
) -> None:
    """Combine the results of a context's parts for one query head of one row.

    Shape: as in `decode_parts`; sinks [heads], of any type; out [rows, heads, VALUE_DIM]; one program per row and head.
    """
    head = tl.program_id(0)
    part = tl.arange(0, PARTS)
    dims = tl.arange(0, VALUE_DIMS)
    context = tl.load(contexts + head // heads)
    if WINDOWED:
        context = tl.minimum(context, window)
    per_part = tl.maximum(tl.cdiv(tl.cdiv(context, TOKENS), parts) * TOKENS, part_tokens)
    there = part * per_part < context
    highest = tl.load(highest_parts + head * parts + part, mask=there, other=-float("inf"))
    most = tl.max(highest, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks + head % heads).to(tl.float32)
        most = tl.maximum(most, sink)
    weights = tl.exp(highest - most)
    total = tl.load(total_parts + head * parts + part, mask=there, other=0.0)
    cells = (head * parts + part)[:, None] * VALUE_DIM + dims[None, :]
    held = there[:, None] & (dims < VALUE_DIM)[None, :]
    summed = tl.load(summed_parts + cells, mask=held, other=0.0)
    whole = tl.sum(total * weights, axis=0)
    if HAS_SINKS:
        whole += tl.exp(sink - most)
    result = tl.sum(summed * weights[:, None], axis=0) / whole
    tl.store(out + head * VALUE_DIM + dims, result.to(out.dtype.element_ty), mask=dims < VALUE_DIM)
