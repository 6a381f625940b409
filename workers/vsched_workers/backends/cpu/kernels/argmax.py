"""Greedy sampling of bfloat16 logits."""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np

from vsched_workers.backends.cpu.kernels.bf16 import bf16_array, ordered
from vsched_workers.backends.cpu.kernels.compilation import compiled


@compiled()
def argmax(logits_at: int, rows: int, width: int, out: Any) -> None:
    """Write the place of the largest logit of every row, the first of equal ones.

    Shape: logits bfloat16 [rows, width]; out int32 [rows]. The loop over all logits only compares, so that it is
    vectorised; the place is looked for afterwards.
    """
    for row in range(rows):
        values = bf16_array(logits_at + 2 * row * width, width)
        highest = ordered(values[0])
        for index in range(width):
            highest = max(highest, ordered(values[index]))
        place = 0
        while ordered(values[place]) != highest:
            place += 1
        out[row] = place


def warm_up() -> None:
    """Compile now, so that the first request does not wait for it."""
    argmax(0, 0, 1, np.empty(0, dtype=np.int32))
