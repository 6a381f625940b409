"""The Triton kernel for products of a single row; imported on CUDA only, where torch includes Triton."""

# As in triton_kernels.py.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: ANN001

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from vsched_workers.backends.cuda.triton_layers import activated


@triton.jit
def multiply_row(
    row,
    weight,
    bias,
    out,
    outputs,
    inputs,
    HAS_BIAS: tl.constexpr,  # noqa: N803  # see triton_kernels.py
    ACTIVATION: tl.constexpr,  # noqa: N803
    OUTPUTS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
) -> None:
    """Multiply one row by OUTPUTS rows of a weight, without tensor cores: reading the weight takes all the time.

    With an ACTIVATION, which is a name of `families.decoder.Activation`, the weight has a gate and an up part, and the
    result is the activation of the first product times the second.

    Shape: row [inputs]; weight [outputs, inputs], with ACTIVATION [2 * outputs, inputs]; bias and out [outputs].
    OUTPUTS divides outputs, and TILE divides inputs.
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    place = tl.arange(0, TILE)
    at = output.to(tl.int64)[:, None] * inputs + place[None, :]
    up_at = at + outputs.to(tl.int64) * inputs
    summed = tl.zeros([OUTPUTS, TILE], tl.float32)
    up_summed = tl.zeros([OUTPUTS, TILE], tl.float32)
    for start in tl.range(0, inputs, TILE, num_stages=STAGES):
        given = tl.load(row + start + place).to(tl.float32)[None, :]
        summed += tl.load(weight + at + start).to(tl.float32) * given
        if ACTIVATION is not None:
            up_summed += tl.load(weight + up_at + start).to(tl.float32) * given
    made = tl.sum(summed, axis=1)
    kind = out.dtype.element_ty
    if HAS_BIAS:
        made += tl.load(bias + output).to(tl.float32)
    if ACTIVATION is None:
        tl.store(out + output, made.to(kind))
    else:
        up = tl.sum(up_summed, axis=1).to(kind)
        opened = activated(made.to(kind).to(tl.float32), ACTIVATION)
        tl.store(out + output, opened.to(kind) * up)
