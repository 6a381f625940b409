"""Products of a mixture's experts: a thread multiplies the rows of one expert at a time."""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vsched_workers.backends.cpu.kernels import gemm
from vsched_workers.backends.cpu.kernels.bf16 import BF16
from vsched_workers.backends.cpu.kernels.compilation import compiled
from vsched_workers.backends.cpu.kernels.gemm import WEIGHT
from vsched_workers.backends.cpu.kernels.thread_pool import spread

_TAGS = BF16, BF16, BF16, BF16
_ROW_BYTES = 2
_EXPERTS_PER_THREAD_MIN = 2
"""With fewer experts per thread, all threads multiply by one expert after the other."""

_multiply = gemm.multiply.call


@compiled()
def _multiply_expert(
    index: int, pool: int, weights: Any, kernels: Any, work: Any, rows_at: int, out_at: int
) -> None:
    expert, first, count = work[index, 0], work[index, 1], work[index, 2]
    weight, own = weights[expert : expert + 1], kernels[expert]
    _multiply(
        own[1] if count >= own[2] else own[0],
        pool,
        _TAGS,
        weight,
        rows_at + first * weight[0].inputs_unpadded * _ROW_BYTES,
        count,
        weight[0].outputs,
        out_at + first * weight[0].outputs * _ROW_BYTES,
    )


@compiled()
def multiply_experts(
    pool: int,
    threads: int,
    weights: npt.NDArray[Any],
    kernels: npt.NDArray[np.int64],
    work: npt.NDArray[np.int64],
    rows_at: int,
    out_at: int,
) -> None:
    """Multiply the rows of each expert in `work` by its weight.

    Args:
        pool: Address of the pool's state.
        threads: Number of threads.
        weights: `WEIGHT` of each expert.
        kernels: Addresses of its kernels for few and for many rows, and the minimum of many, int64 [experts, 3].
        work: Expert, first row and number of rows, int64 [n, 3].
        rows_at: Address of all rows, bfloat16.
        out_at: Address of the results, bfloat16.
    """
    if len(work) < threads * _EXPERTS_PER_THREAD_MIN:
        for index in range(len(work)):
            _multiply_expert(index, pool, weights, kernels, work, rows_at, out_at)
        return
    spread(pool, len(work), 1, _multiply_expert, (0, weights, kernels, work, rows_at, out_at))


def warm_up() -> None:
    """Compile `multiply_experts`."""
    none = np.empty((0, 3), dtype=np.int64)
    multiply_experts(0, 1, np.zeros(1, dtype=WEIGHT), none, none, 0, 0)
