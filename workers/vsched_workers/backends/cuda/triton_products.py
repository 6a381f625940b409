"""The Triton kernels for quantized weights; imported on CUDA only, where torch includes Triton.

For small M, activations are multiplied by the quantized values: an integer or an FP8 value is exact in 16 bits, and
scales are applied once per sum over a group, so only the sum is rounded. For large M arithmetic dominates, and the
weight is dequantized once for torch's product.
"""

# As in triton_kernels.py.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: ANN001

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit
def multiply_few(
    rows,
    values,
    scales,
    offsets,
    sums,
    count,
    outputs,
    inputs,
    bytes_of_one,
    group,
    groups,
    part_tiles,
    KIND: tl.constexpr,  # noqa: N803  # see triton_kernels.py
    CENTRE: tl.constexpr,  # noqa: N803
    HAS_OFFSETS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    OUTPUTS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
) -> None:
    """Multiply a block of rows by a block of outputs over one split of the inputs.

    Shape: rows [count, inputs]; values uint8 [outputs, bytes_of_one], for int4 with the first of two inputs in the low
    nibble; scales and offsets [outputs, groups]; sums float32 [parts, count, outputs]. TILE divides `group`; a split
    has `part_tiles` tiles.
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    real, requested = output < outputs, row < count
    line = output.to(tl.int64)[:, None]
    summed = tl.zeros([OUTPUTS, ROWS], tl.float32)
    first = part * part_tiles * TILE
    last = tl.minimum(inputs, first + part_tiles * TILE)
    for start in range(first, last, TILE):
        place = start + tl.arange(0, TILE)
        there = requested[None, :] & (place < inputs)[:, None]
        given = tl.load(rows + row[None, :] * inputs + place[:, None], mask=there, other=0.0)
        # A byte contains two int4 values.
        byte = start // 2 + tl.arange(0, TILE // 2) if KIND == "int4" else place
        held = real[:, None] & (byte < bytes_of_one)[None, :]
        bits = tl.load(values + line * bytes_of_one + byte[None, :], mask=held, other=0)
        if KIND == "int4":
            weight = tl.join(bits & 15, bits >> 4).reshape(OUTPUTS, TILE).to(given.dtype) - CENTRE
        elif KIND == "fp8":
            weight = bits.to(tl.float8e4nv, bitcast=True).to(given.dtype)
        else:
            weight = bits.to(tl.int8, bitcast=True).to(given.dtype)
        cell = output.to(tl.int64) * groups + start // group
        scale = tl.load(scales + cell, mask=real, other=0.0).to(tl.float32)
        summed += tl.dot(weight, given, input_precision="ieee") * scale[:, None]
        if HAS_OFFSETS:
            offset = tl.load(offsets + cell, mask=real, other=0.0).to(tl.float32)
            summed += offset[:, None] * tl.sum(given.to(tl.float32), axis=0)[None, :]
    at = (part * count + row).to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(sums + at, summed, mask=real[:, None] & requested[None, :])


@triton.jit
def widen(
    values,
    scales,
    offsets,
    weight,
    inputs,
    bytes_of_one,
    group,
    groups,
    KIND: tl.constexpr,  # noqa: N803
    CENTRE: tl.constexpr,  # noqa: N803
    HAS_OFFSETS: tl.constexpr,  # noqa: N803
    INPUTS: tl.constexpr,  # noqa: N803
) -> None:
    """Dequantize some values of one output, in the type of `weight` [outputs, inputs]; shapes as above."""
    output = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * INPUTS + tl.arange(0, INPUTS)
    there = place < inputs
    byte = place // 2 if KIND == "int4" else place
    bits = tl.load(values + output * bytes_of_one + byte, mask=there, other=0)
    if KIND == "int4":
        made = ((bits >> ((place % 2) * 4).to(tl.uint8)) & 15).to(tl.float32) - CENTRE
    elif KIND == "fp8":
        made = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        made = bits.to(tl.int8, bitcast=True).to(tl.float32)
    cell = output * groups + place // group
    made *= tl.load(scales + cell, mask=there, other=0.0).to(tl.float32)
    if HAS_OFFSETS:
        made += tl.load(offsets + cell, mask=there, other=0.0).to(tl.float32)
    tl.store(weight + output * inputs + place, made.to(weight.dtype.element_ty), mask=there)
