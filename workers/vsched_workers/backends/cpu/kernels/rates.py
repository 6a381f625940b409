"""What is timed to tell whether this processor multiplies pairs of bfloat16 or float32 faster (`operand_choice.py`)."""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import numba

from vsched_workers.backends.cpu.kernels.gemm import PASS_ROWS, Pass
from vsched_workers.backends.cpu.kernels.numba_basics import compiled


def _passing(
    _context: Any,
    kind: Any,
    _rows_at: Any,
    _row_bytes: Any,
    _panel_at: Any,
    _pairs: Any,
    _out_at: Any,
    _out_bytes: Any,
) -> Any:
    """Multiply six rows with a panel."""
    single = isinstance(kind, numba.types.Float)

    def make(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _, *inputs, out_at, out_bytes = arguments
        one = Pass(builder, PASS_ROWS, single=single)
        one.store(one.sums(*inputs), out_at, out_bytes)

    return numba.void(kind, *[numba.intp] * 6), make


_pass: Any = numba.extending.intrinsic(_passing)


@compiled()
def multiply_again(
    kind: Any,
    turns: int,
    rows_at: int,
    row_bytes: int,
    panel_at: int,
    pairs: int,
    out_at: int,
    out_bytes: int,
) -> None:
    """Multiply six rows with a panel, `turns` times; see `kernels/gemm.py` for the arguments."""
    for _ in range(turns):
        _pass(kind, rows_at, row_bytes, panel_at, pairs, out_at, out_bytes)
