"""The Triton kernels of the fused vision tower; imported on CUDA only, where torch includes Triton.

They round at the same points as transformers' modules: the residual sum, the norm, and rotated queries and keys.
"""

# As in triton_kernels.py.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: ANN001

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit
def add_layer_norm(
    hidden,
    added,
    weight,
    bias,
    normed,
    width,
    eps,
    HAS_ADDED: tl.constexpr,  # noqa: N803  # see triton_kernels.py
    WIDTH: tl.constexpr,  # noqa: N803
) -> None:
    """Add to a row, and write its layer norm.

    Shape: as `triton_layers.add_norm`; bias [width].
    """
    place = tl.arange(0, WIDTH)
    there = place < width
    at = tl.program_id(0).to(tl.int64) * width + place
    row = tl.load(hidden + at, mask=there, other=0.0)
    if HAS_ADDED:
        row += tl.load(added + at, mask=there, other=0.0)
        tl.store(hidden + at, row, mask=there)
    wide = row.to(tl.float32)
    centred = tl.where(there, wide - tl.sum(wide, axis=0) / width, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / width + eps)
    weights = tl.load(weight + place, mask=there, other=0.0).to(tl.float32)
    shift = tl.load(bias + place, mask=there, other=0.0).to(tl.float32)
    tl.store(normed + at, (centred * scale * weights + shift).to(row.dtype), mask=there)


@triton.jit
def rotate_patches(
    qkv,
    cos,
    sin,
    HEADS: tl.constexpr,  # noqa: N803
    PAIRS: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    DIMS: tl.constexpr,  # noqa: N803
) -> None:
    """Rotate the queries and keys of one row in place.

    Shape: qkv [rows, 3 * HEADS * 2 * HALF]; cos and sin float32 [rows, HALF]. PAIRS and DIMS are 2 * HEADS and HALF,
    rounded up to powers of two.
    """
    row = tl.program_id(0).to(tl.int64)
    head, place = tl.arange(0, PAIRS), tl.arange(0, DIMS)
    within = place < HALF
    there = (head < 2 * HEADS)[:, None] & within[None, :]
    source = qkv + row * 6 * HEADS * HALF + head[:, None] * 2 * HALF + place[None, :]
    first = tl.load(source, mask=there, other=0.0)
    second = tl.load(source + HALF, mask=there, other=0.0)
    cosine = tl.load(cos + row * HALF + place, mask=within, other=0.0)[None, :]
    sine = tl.load(sin + row * HALF + place, mask=within, other=0.0)[None, :]
    left, right = first.to(tl.float32), second.to(tl.float32)
    tl.store(source, (left * cosine - right * sine).to(first.dtype), mask=there)
    tl.store(source + HALF, (right * cosine + left * sine).to(first.dtype), mask=there)


@triton.jit
def attend_windows(
    qkv,
    cos,
    sin,
    ends,
    out,
    scaling,
    HEADS: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    DIMS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
) -> None:
    """Rotate the queries and keys of one head of one window, and attend.

    All keys of a window are read at once, so that the softmax needs no loop; a query's dot product is the sum over the
    two halves of a head, which are the rotated pairs. Angles are read twice, and values before they are needed: so
    fewer registers are in use at a time, and more programs run on an SM.

    Shape: as in `rotate_patches`; ends int32 [windows + 1]; out [rows, HEADS * 2 * HALF]. ROWS is the size of the
    longest window, rounded up to a power of two.
    """
    window, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(ends + window), tl.load(ends + window + 1)
    first_row = begin.to(tl.int64)
    row, place = tl.arange(0, ROWS), tl.arange(0, DIMS)
    real = row < end - begin
    there = real[:, None] & (place < HALF)[None, :]
    queries = qkv + first_row * 6 * HEADS * HALF + head * 2 * HALF
    keys = queries + 2 * HEADS * HALF
    values = keys + 2 * HEADS * HALF
    cell = row[:, None] * 6 * HEADS * HALF + place[None, :]
    angle = first_row * HALF + row[:, None] * HALF + place[None, :]
    kind = qkv.dtype.element_ty
    left = tl.load(keys + cell, mask=there, other=0.0).to(tl.float32)
    right = tl.load(keys + HALF + cell, mask=there, other=0.0).to(tl.float32)
    cosine = tl.load(cos + angle, mask=there, other=0.0)
    sine = tl.load(sin + angle, mask=there, other=0.0)
    key = (left * cosine - right * sine).to(kind)
    other_key = (right * cosine + left * sine).to(kind)
    left = tl.load(queries + cell, mask=there, other=0.0).to(tl.float32)
    right = tl.load(queries + HALF + cell, mask=there, other=0.0).to(tl.float32)
    # With another policy, or the compiler would keep the first ones in registers.
    cosine = tl.load(cos + angle, mask=there, other=0.0, eviction_policy="evict_last")
    sine = tl.load(sin + angle, mask=there, other=0.0, eviction_policy="evict_last")
    query = (left * cosine - right * sine).to(kind)
    other_query = (right * cosine + left * sine).to(kind)
    value = tl.load(values + cell, mask=there, other=0.0)
    other_value = tl.load(values + HALF + cell, mask=there, other=0.0)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    scores = tl.dot(other_query, tl.trans(other_key), scores, input_precision="ieee")
    scores = tl.where(real[None, :], scores * scaling, -float("inf"))
    weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    total = tl.sum(weights, axis=1)[:, None]
    rounded = weights.to(kind)
    made = out + first_row * 2 * HEADS * HALF + head * 2 * HALF
    target = row[:, None] * 2 * HEADS * HALF + place[None, :]
    summed = tl.dot(rounded, value, input_precision="ieee") / total
    tl.store(made + target, summed.to(kind), mask=there)
    summed = tl.dot(rounded, other_value, input_precision="ieee") / total
    tl.store(made + HALF + target, summed.to(kind), mask=there)
