"""The Triton kernels of decode attention; imported on CUDA only, where torch includes Triton.

A row of a decode step reads its whole context, and a context that is read by one program keeps one SM busy while all
others wait for it. So a context is read in parallel parts, and a second kernel reduces them. A context has
`usual_parts` parts, which keep all SMs busy if all contexts are equally long. A part is at least `PART_TOKENS_MIN`
tokens long, and at most `PART_TOKENS_MAX` as long as enough parts were launched: so a long context among many short
ones is spread over SMs, too, and a captured step serves contexts of any length. Programs for parts beyond the context's
end return at once.

Prior art: Flash-Decoding (Dao et al., 2023) for the parts, PagedAttention (SOSP 2023) for the block tables.
"""

# Triton compiles these functions: to a type checker they are untyped, and an annotation other than Triton's own is a
# global variable that no kernel may read.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: ANN001

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

PART_TOKENS_MIN: tl.constexpr = tl.constexpr(64)
PART_TOKENS_MAX: tl.constexpr = tl.constexpr(1024)


@triton.jit
def tokens_of_part(  # noqa: ANN201
    context,
    parts,
    usual_parts,
    TOKENS: tl.constexpr,  # noqa: N803  # Triton's marker of compile-time constants
):
    """Return the number of tokens in each part of a context, a multiple of TOKENS."""
    tiles = tl.cdiv(context, TOKENS)
    usual = tl.cdiv(tiles, usual_parts) * TOKENS
    usual = tl.minimum(tl.maximum(usual, PART_TOKENS_MIN), PART_TOKENS_MAX)
    return tl.maximum(tl.cdiv(tiles, parts) * TOKENS, usual)


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
    usual_parts,
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
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
    up to powers of two; TOKENS divides PART_TOKENS_MIN.

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
    per_part = tokens_of_part(context - start_of_all, parts, usual_parts, TOKENS)
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
        # A key or value is read once, and must not displace the weights that follow from the L2 cache.
        key = tl.load(
            keys + cell * HEAD_DIM + dims[None, :],
            mask=held,
            other=0.0,
            eviction_policy="evict_first",
        )
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scaling
        if CAPPED:  # tanh by the sigmoid
            scores = (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0) * softcap
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        faded = tl.exp(highest - higher)
        value = tl.load(
            values + cell * VALUE_DIM + value_dims[None, :],
            mask=seen[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
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
    usual_parts,
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
    per_part = tokens_of_part(context, parts, usual_parts, TOKENS)
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
