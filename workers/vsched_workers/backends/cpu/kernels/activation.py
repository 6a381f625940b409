"""SwiGLU, the activation between the products of a feed-forward layer, of bfloat16 rows.

    gate <- silu(gate) * up,   silu(x) = x / (1 + exp(-x))    (silu and product rounded)

Source: Shazeer, "GLU Variants Improve Transformer" (2020).
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

import numba
import numpy as np

from vsched_workers.backends.cpu.kernels.bf16 import bf16_array, exp, narrow, through_bf16, widen
from vsched_workers.backends.cpu.kernels.compilation import compiled, threaded

_SILU_INPUT_MIN = np.float32(-87.0)
"""Below it silu is less than 1e-35, and its exponential more than a float32 holds."""


# The whole expression stands in one loop, in a function of its own: LLVM's code for it is 5 to 15 % faster so.


@compiled()
def _swiglu_row(gate_at: int, up_at: int, width: int) -> None:
    gate, up = bf16_array(gate_at, width), bf16_array(up_at, width)
    for index in range(width):
        value = widen(gate[index])
        active = value / (np.float32(1.0) + exp(-value))
        active = through_bf16(active if value > _SILU_INPUT_MIN else np.float32(0.0))
        gate[index] = narrow(active * widen(up[index]))


@threaded
def swiglu(gate_at: int, up_at: int, rows: int, width: int) -> None:
    """Replace rows of the gate by silu(gate) * up. Shape: gate, up [rows, width]."""
    for row in numba.prange(rows):
        _swiglu_row(gate_at + 2 * row * width, up_at + 2 * row * width, width)


def warm_up(*, threads: int) -> None:
    """Compile now, so that the first request does not wait for it."""
    for kernel in swiglu.needed(threads):
        kernel(0, 0, 0, 1)
