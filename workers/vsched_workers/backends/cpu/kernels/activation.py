"""Activation functions of bfloat16 MLPs.

    gate <- silu(gate) * up,   silu(x) = x / (1 + exp(-x))    (silu and product rounded)
    gate <- gelu(gate) * up

MLPs without a gate have no `up`: its address is 0, and nothing is multiplied.

gelu(x) is x P(N <= x) for a standard normal N, or its approximation

    x / (1 + exp(-2 c (x + 0.044715 x^3))),   c = sqrt(2 / pi)

Source: Shazeer, "GLU Variants Improve Transformer" (2020); Hendrycks and Gimpel, "Gaussian Error Linear Units"
(2016); the tail of the normal distribution by Abramowitz and Stegun, formula 7.1.26.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from vsched_workers.backends.cpu.kernels.bf16 import bf16_array, exp, narrow, through_bf16, widen
from vsched_workers.backends.cpu.kernels.compilation import LONG, compiled, kernel
from vsched_workers.backends.cpu.kernels.thread_pool import rows_together, spread

_SILU_INPUT_MIN = np.float32(-87.0)
"""Below it silu is less than 1e-35, and its exponential overflows float32."""
_CLEAR = np.float32(16.0)
"""Beyond it both functions are the identity, or zero."""
_ROOT_HALF = np.float32(0.7071067811865476)
_TANH_FACTOR = np.float32(2.0 * 0.7978845608028654)
_CUBE = np.float32(0.044715)


@compiled()
def _sigmoid(value: Any) -> Any:
    return np.float32(1.0) / (np.float32(1.0) + exp(-value))


@compiled()
def _within(value: Any) -> Any:
    return min(max(value, -_CLEAR), _CLEAR)


@compiled()
def _gelu(value: Any) -> Any:
    distance = abs(_within(value)) * _ROOT_HALF
    part = np.float32(1.0) / (np.float32(1.0) + np.float32(0.3275911) * distance)
    series = np.float32(1.061405429) * part - np.float32(1.453152027)
    series = series * part + np.float32(1.421413741)
    series = series * part - np.float32(0.284496736)
    series = (series * part + np.float32(0.254829592)) * part
    tail = np.float32(0.5) * series * exp(-distance * distance)
    return value * (tail if value < np.float32(0.0) else np.float32(1.0) - tail)


@compiled()
def _gelu_tanh(value: Any) -> Any:
    near = _within(value)
    return value * _sigmoid(_TANH_FACTOR * (near + _CUBE * near * near * near))


@compiled()
def silu(value: Any) -> Any:
    """Return x / (1 + exp(-x))."""
    active = value / (np.float32(1.0) + exp(-value))
    return active if value > _SILU_INPUT_MIN else np.float32(0.0)


def _row_of(function: Any) -> Any:
    """Return the loop over a row for a function, which is compiled into each kernel and stored on disk with it.

    Compiled functions are linked by name, also with those from the disk: each needs a name of its own.
    """

    def apply(row: int, gate_at: int, up_at: int, width: int) -> None:
        # The whole expression is one loop in a function of its own: LLVM's code for that is 5 to 15 % faster.
        skip = 2 * row * width
        gate, up = bf16_array(gate_at + skip, width), bf16_array(up_at + skip, width)
        if up_at:
            for index in range(width):
                active = through_bf16(function(widen(gate[index])))
                gate[index] = narrow(active * widen(up[index]))
        else:
            for index in range(width):
                gate[index] = narrow(function(widen(gate[index])))

    apply.__qualname__ = f"{function.__name__}.{apply.__name__}"
    return numba.njit(fastmath=True, nogil=True, error_model="numpy")(apply)


_silu_row, _gelu_row, _gelu_tanh_row = map(_row_of, (silu, _gelu, _gelu_tanh))


@kernel(*[LONG] * 5)
def swiglu(pool: int, gate_at: int, up_at: int, rows: int, width: int) -> None:
    """Replace `gate` by silu(gate) * up. Shape: gate, up [rows, width]."""
    spread(pool, rows, rows_together(width), _silu_row, (gate_at, up_at, width))


@kernel(*[LONG] * 5)
def gelu(pool: int, gate_at: int, up_at: int, rows: int, width: int) -> None:
    """Multiply the gelu of `gate` by `up`, in place of `gate`."""
    spread(pool, rows, rows_together(width), _gelu_row, (gate_at, up_at, width))


@kernel(*[LONG] * 5)
def gelu_tanh(pool: int, gate_at: int, up_at: int, rows: int, width: int) -> None:
    """The same, with gelu approximated by tanh."""
    spread(pool, rows, rows_together(width), _gelu_tanh_row, (gate_at, up_at, width))
