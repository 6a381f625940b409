"""LoRA on bfloat16 rows: `made <- made + up (down row)`, each row with the matrices of its own adapter.

All adapters of a product are one call. Rows are ordered by adapter, so that matrices stay in the cache from one row
to the next. Sums are float32 and in one order: a row has the same bits alone and in a batch.

Source: Chen et al., "Punica: Multi-Tenant LoRA Serving" (2023), for rows of many adapters in one call.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np

from vsched_workers.backends.cpu.kernels.bf16 import bf16_array, float32_array, narrow, widen
from vsched_workers.backends.cpu.kernels.compilation import LONG, array_of, compiled, kernel
from vsched_workers.backends.cpu.kernels.thread_pool import spread

RANKS = 4
"""Ranks are padded with zeros to a multiple of this number, which are accumulated at once."""

PART = np.dtype(
    [
        ("down_at", np.int64),
        ("up_at", np.int64),
        ("rank", np.int64),
        ("first", np.int64),
        ("outputs", np.int64),
    ]
)
"""The part of an adapter for the outputs [first, first + outputs) of a product; rank 0 adds nothing.

At `down_at` is float32 [rank, inputs] (A of LoRA), at `up_at` float32 [rank, outputs] (B transposed), times the
scaling.
"""


@compiled()
def _down(row: Any, down_at: int, rank: int, sums: Any) -> None:
    """Multiply a row by each row of a matrix."""
    width = len(row)
    for start in range(0, rank, 4):
        at = down_at + 4 * start * width
        one, two = float32_array(at, width), float32_array(at + 4 * width, width)
        three = float32_array(at + 8 * width, width)
        four = float32_array(at + 12 * width, width)
        first = second = third = fourth = np.float32(0.0)
        for index in range(width):
            first += row[index] * one[index]
            second += row[index] * two[index]
            third += row[index] * three[index]
            fourth += row[index] * four[index]
        sums[start], sums[start + 1] = first, second
        sums[start + 2], sums[start + 3] = third, fourth


@compiled()
def _up(sums: Any, up_at: int, rank: int, total: Any) -> None:
    """Add to a row the rows of a matrix, each times a sum."""
    width = len(total)
    for start in range(0, rank, 4):
        at = up_at + 4 * start * width
        one, two = float32_array(at, width), float32_array(at + 4 * width, width)
        three = float32_array(at + 8 * width, width)
        four = float32_array(at + 12 * width, width)
        first, second = sums[start], sums[start + 1]
        third, fourth = sums[start + 2], sums[start + 3]
        for index in range(width):
            total[index] += (
                first * one[index]
                + second * two[index]
                + third * three[index]
                + fourth * four[index]
            )


@compiled()
def _add_row(
    place: int,
    rows_at: int,
    inputs: int,
    made_at: int,
    width: int,
    order: Any,
    owners: Any,
    all_parts: Any,
) -> None:
    parts, at = all_parts[owners[place]], made_at + 2 * order[place] * width
    source = bf16_array(rows_at + 2 * order[place] * inputs, inputs)
    row = np.empty(inputs, dtype=np.float32)
    for index in range(inputs):
        row[index] = widen(source[index])
    for number in range(len(parts)):
        rank, outputs = parts[number].rank, parts[number].outputs
        if rank:
            sums = np.empty(rank, dtype=np.float32)
            _down(row, parts[number].down_at, rank, sums)
            target = bf16_array(at + 2 * parts[number].first, outputs)
            total = np.empty(outputs, dtype=np.float32)
            for index in range(outputs):
                total[index] = widen(target[index])
            _up(sums, parts[number].up_at, rank, total)
            for index in range(outputs):
                target[index] = narrow(total[index])


@kernel(*[LONG] * 5, array_of(np.int64), array_of(np.int64), array_of(PART, 2))
def add_low_rank(
    pool: int,
    rows_at: int,
    inputs: int,
    made_at: int,
    width: int,
    order: Any,
    owners: Any,
    parts: Any,
) -> None:
    """Add the adapters' products to the rows in `order`.

    Shape: rows bfloat16 [rows, inputs], made bfloat16 [rows, width]; order, owners int64 [n], the row and its
    adapter; parts `PART` [adapters, parts of the product].
    """
    arguments = rows_at, inputs, made_at, width, order, owners, parts
    spread(pool, len(order), 1, _add_row, arguments)
