"""The Triton kernels between the products of a layer; imported on CUDA only, where torch includes Triton.

Each does in one pass over the rows the work of five to ten kernels of transformers' modules. They round at the same
points: the residual sum, the normalized row before its weights, and the activation before the product with up.
"""

# As in triton_kernels.py.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: ANN001

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit
def add_norm(
    hidden,
    added,
    weight,
    normed,
    width,
    eps,
    HAS_ADDED: tl.constexpr,  # noqa: N803  # see triton_kernels.py
    WIDTH: tl.constexpr,  # noqa: N803
) -> None:
    """Add to a row, and write its RMS norm.

    Shape: hidden, added and normed [rows, width], weight [width]; WIDTH is `width`, rounded up to a power of two.
    """
    place = tl.arange(0, WIDTH)
    there = place < width
    at = tl.program_id(0).to(tl.int64) * width + place
    row = tl.load(hidden + at, mask=there, other=0.0)
    if HAS_ADDED:
        row += tl.load(added + at, mask=there, other=0.0)
        tl.store(hidden + at, row, mask=there)
    wide = row.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
    rounded = (wide * scale).to(row.dtype)
    tl.store(normed + at, rounded * tl.load(weight + place, mask=there, other=0.0), mask=there)


@triton.jit
def rotate_and_store(
    qkv,
    cos,
    sin,
    slots,
    query_weight,
    key_weight,
    queries,
    keys,
    values,
    eps,
    HEADS: tl.constexpr,  # noqa: N803
    KV_HEADS: tl.constexpr,  # noqa: N803
    NORMS: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    DIMS: tl.constexpr,  # noqa: N803
) -> None:
    """Normalize (if NORMS) and rotate one head of one row; keys and values go to the cache, keys also in place.

    Shape: qkv [rows, (HEADS + 2 * KV_HEADS) * 2 * HALF]; cos and sin [rows, HALF]; slots int64 [rows]; weights [2 *
    HALF]; queries [rows, HEADS, 2 * HALF]; keys and values [slots, KV_HEADS, 2 * HALF]. DIMS is HALF, rounded up to a
    power of two.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, DIMS)
    there = place < HALF
    source = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF + place
    first = tl.load(source, mask=there, other=0.0)
    second = tl.load(source + HALF, mask=there, other=0.0)
    slot = tl.load(slots + row) * KV_HEADS
    if head >= HEADS + KV_HEADS:
        kept = values + (slot + head - HEADS - KV_HEADS) * 2 * HALF + place
        tl.store(kept, first, mask=there)
        tl.store(kept + HALF, second, mask=there)
    else:
        if NORMS:
            weight = (query_weight if head < HEADS else key_weight) + place
            left, right = first.to(tl.float32), second.to(tl.float32)
            squares = tl.sum(left * left + right * right, axis=0)
            scale = 1.0 / tl.sqrt(squares / (2 * HALF) + eps)
            first = (left * scale).to(first.dtype) * tl.load(weight, mask=there, other=0.0)
            second = (right * scale).to(second.dtype) * tl.load(
                weight + HALF, mask=there, other=0.0
            )
        cosine = tl.load(cos + row * HALF + place, mask=there, other=0.0).to(tl.float32)
        sine = tl.load(sin + row * HALF + place, mask=there, other=0.0).to(tl.float32)
        left, right = first.to(tl.float32), second.to(tl.float32)
        turned = (left * cosine - right * sine).to(first.dtype)
        other = (right * cosine + left * sine).to(first.dtype)
        if head < HEADS:
            made = queries + (row * HEADS + head) * 2 * HALF + place
            tl.store(made, turned, mask=there)
            tl.store(made + HALF, other, mask=there)
        else:
            kept = keys + (slot + head - HEADS) * 2 * HALF + place
            tl.store(kept, turned, mask=there)
            tl.store(kept + HALF, other, mask=there)
            tl.store(source, turned, mask=there)
            tl.store(source + HALF, other, mask=there)


@triton.jit
def activated(  # noqa: ANN201
    wide,
    ACTIVATION: tl.constexpr,  # noqa: N803
):
    """Return the activation of float32 values; ACTIVATION is a name of `families.decoder.Activation`."""
    if ACTIVATION == "SILU":
        opened = wide / (1.0 + tl.exp(-wide))
    elif ACTIVATION == "GELU":
        opened = wide * 0.5 * (1.0 + tl.erf(wide * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
        opened = wide / (1.0 + tl.exp(-2.0 * inner))
    return opened


@triton.jit
def gate(
    gate_up,
    gated,
    width,
    ACTIVATION: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
) -> None:
    """Write the activation of a row's first half (gate) times its second half (up).

    Shape: gate_up [rows, 2 * width], gated [rows, width]; ACTIVATION is a name of `families.decoder.Activation`.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = place < width
    source = gate_up + row * 2 * width + place
    given = tl.load(source, mask=there, other=0.0)
    opened = activated(given.to(tl.float32), ACTIVATION)
    up = tl.load(source + width, mask=there, other=0.0)
    tl.store(gated + row * width + place, opened.to(given.dtype) * up, mask=there)
