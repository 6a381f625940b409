"""Decode attention on the CPU that reads the paged cache where it lies.

Gathering every context before attending costs more than attending. This kernel walks the block tables instead: for each
row and each key head it scores all positions for all query heads that share the head, takes the softmax, and sums the
values. Both inner loops run over the values of one head, which lie together, so that the compiler vectorises them.

bfloat16 has no type in numpy; its values arrive as uint16 and are widened by a shift, which is what they are: the upper
half of a float32. Sums are float32 in either case.

The exponential is a polynomial: the compiler vectorises it, and does not vectorise a call of the C library.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from vsched_workers.attention import PagedStep

_LOG2_E = np.float32(1.4426950408889634)
_LOWEST = np.float32(-126.0)


def _compiled(**options: Any) -> Callable[[Any], Any]:
    """Compile with a cache on disk where there is a place for one."""

    def compile_function(function: Any) -> Any:
        try:
            return numba.njit(cache=True, fastmath=True, nogil=True, **options)(function)
        except RuntimeError:
            return numba.njit(fastmath=True, nogil=True, **options)(function)

    return compile_function


@_compiled()
def _softmax(scores: Any, bits: Any, powers: Any, length: int) -> Any:
    """Replace scores by exp(score - highest) and return their sum.

    exp(x) = 2**n * 2**f with n whole and 0 <= f < 1; 2**f by its series, 2**n by writing the exponent bits.
    """
    highest = scores[0]
    for index in range(1, length):
        highest = max(highest, scores[index])
    for index in range(length):
        power = max((scores[index] - highest) * _LOG2_E, _LOWEST)
        whole = np.floor(power)
        rest = (power - whole) * np.float32(0.6931471805599453)
        series = np.float32(1 / 5040)
        series = series * rest + np.float32(1 / 720)
        series = series * rest + np.float32(1 / 120)
        series = series * rest + np.float32(1 / 24)
        series = series * rest + np.float32(1 / 6)
        series = series * rest + np.float32(0.5)
        series = series * rest + np.float32(1.0)
        series = series * rest + np.float32(1.0)
        scores[index] = series
        bits[index] = np.int32(whole + np.float32(127.0)) << np.int32(23)
    total = np.float32(0.0)
    for index in range(length):
        scores[index] *= powers[index]
        total += scores[index]
    return total


def _widening(_context: Any, value: Any) -> Any:
    """Read a cached value as float32: itself, or the upper half of its bits where the cache is bfloat16."""
    if isinstance(value, numba.types.Float):
        return numba.float32(value), lambda _context, _builder, _signature, arguments: arguments[0]

    def widen(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        shifted = builder.shl(builder.zext(arguments[0], word), ir.Constant(word, 16))
        return builder.bitcast(shifted, ir.FloatType())

    return numba.float32(value), widen


_as_float: Any = numba.extending.intrinsic(_widening)


# Every array below is indexed whole: a slice of one would lose that its last axis is contiguous, and with it the
# vectors.


@_compiled()
def _score(
    query: Any, keys: Any, table: Any, kv_head: int, length: int, block_size: int, scores: Any
) -> None:
    """Write the products of the queries [group, head dim] with every key into `scores` [group, length]."""
    group, head_dim = query.shape
    for first in range(0, length, block_size):
        slot = table[first // block_size] * block_size - first
        for index in range(first, min(first + block_size, length)):
            for head in range(group):
                total = np.float32(0.0)
                for value in range(head_dim):
                    total += query[head, value] * _as_float(keys[slot + index, kv_head, value])
                scores[head, index] = total


@_compiled()
def _combine(
    weights: Any, values: Any, table: Any, kv_head: int, length: int, block_size: int, summed: Any
) -> None:
    """Add every value, times its weight [group, length], to `summed` [group, head dim]."""
    group, head_dim = summed.shape
    for first in range(0, length, block_size):
        slot = table[first // block_size] * block_size - first
        for index in range(first, min(first + block_size, length)):
            for head in range(group):
                weight = weights[head, index]
                for value in range(head_dim):
                    summed[head, value] += weight * _as_float(values[slot + index, kv_head, value])


@_compiled()
def _attend_head(
    query: Any,
    keys: Any,
    values: Any,
    tables: Any,
    row: int,
    kv_head: int,
    length: int,
    block_size: int,
    scaling: Any,
    out: Any,
) -> None:
    """Attend for the query heads of one row that share one key head."""
    group, head_dim = query.shape[2], query.shape[3]
    scores = np.empty((group, length), dtype=np.float32)
    bits = np.empty(length, dtype=np.int32)
    scaled = np.empty((group, head_dim), dtype=np.float32)
    summed = np.zeros((group, head_dim), dtype=np.float32)
    for head in range(group):
        for value in range(head_dim):
            scaled[head, value] = query[row, kv_head, head, value] * scaling
    _score(scaled, keys, tables[row], kv_head, length, block_size, scores)
    for head in range(group):
        total = _softmax(scores[head], bits, bits.view(np.float32), length)
        share = np.float32(1.0) / total
        for index in range(length):
            scores[head, index] *= share
    _combine(scores, values, tables[row], kv_head, length, block_size, summed)
    for head in range(group):
        for value in range(head_dim):
            out[row, kv_head, head, value] = summed[head, value]


# Two functions, since the cache on disk tells functions apart by their names and not by how they are compiled.


@_compiled()
def _attend_serial(
    query: Any,
    keys: Any,
    values: Any,
    tables: Any,
    contexts: Any,
    block_size: int,
    scaling: Any,
    out: Any,
) -> None:
    rows, kv_heads = query.shape[0], query.shape[1]
    for task in range(rows * kv_heads):
        row, head = task // kv_heads, task % kv_heads
        _attend_head(
            query, keys, values, tables, row, head, contexts[row], block_size, scaling, out
        )


@_compiled(parallel=True)
def _attend_parallel(
    query: Any,
    keys: Any,
    values: Any,
    tables: Any,
    contexts: Any,
    block_size: int,
    scaling: Any,
    out: Any,
) -> None:
    rows, kv_heads = query.shape[0], query.shape[1]
    for task in numba.prange(rows * kv_heads):
        row, head = task // kv_heads, task % kv_heads
        _attend_head(
            query, keys, values, tables, row, head, contexts[row], block_size, scaling, out
        )


class NumbaDecode:
    """The kernel, compiled for one type."""

    def __init__(self, dtype: torch.dtype, threads: int) -> None:
        self._dtype = dtype
        self._attend = _attend_serial if threads == 1 else _attend_parallel
        if threads > 1:
            limits: Any = numba.config
            numba.set_num_threads(min(threads, limits.NUMBA_NUM_THREADS))
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile now, so that the first request does not wait for it."""
        cached = np.zeros((2, 1, 2), dtype=np.uint16 if self._is_half else np.float32)
        query = np.zeros((1, 1, 1, 2), dtype=np.float32)
        self._attend(
            query,
            cached,
            cached,
            np.zeros((1, 1), dtype=np.int32),
            np.ones(1, dtype=np.int32),
            2,
            np.float32(1.0),
            np.empty_like(query),
        )

    @property
    def _is_half(self) -> bool:
        return self._dtype == torch.bfloat16

    def __call__(
        self, query: torch.Tensor, layer: int, step: PagedStep, scaling: float
    ) -> torch.Tensor:
        """Return [rows, heads, head dim] for a query of the same shape."""
        keys, values = step.cache.arrays[layer]
        rows, heads, head_dim = query.shape
        kv_heads = keys.shape[1]
        grouped: npt.NDArray[np.float32] = (
            query.float().contiguous().view(rows, kv_heads, heads // kv_heads, head_dim).numpy()
        )
        out = np.empty(grouped.shape, dtype=np.float32)
        self._attend(
            grouped,
            keys,
            values,
            step.tables,
            step.contexts,
            step.cache.block_size,
            np.float32(scaling),
            out,
        )
        return torch.from_numpy(out).view(rows, heads, head_dim).to(self._dtype)
