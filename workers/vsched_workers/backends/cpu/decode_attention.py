"""Decode attention on the CPU that reads the paged cache where it lies.

Gathering every context before attending costs more than attending. This kernel walks the block tables instead: for each
row it scores all positions for all query heads, takes the softmax, and sums the values. The inner loops run over the
values of one head, which lie together, so that the compiler vectorises them.

The cache is float32 or bfloat16 (see `numba_basics.py`). Sums are float32 in either case.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from vsched_workers.backends.cpu.kernels.numba_basics import (
    as_float,
    compiled,
    exp2,
    larger,
    prefetch,
)

if TYPE_CHECKING:
    from vsched_workers.batching.paged_attention import PagedStep

LOG2_E = np.float32(1.4426950408889634)

TASKS_MIN = 4
"""Fewer rows a thread are cut by heads too."""


@compiled()
def softmax(scores: Any, head: int, length: int, factor: Any) -> None:
    """Replace a head's scores by their softmax; powers of two of `factor` times the scores are weighed."""
    highest = scores[head, 0]
    for index in range(1, length):
        highest = larger(highest, scores[head, index])
    total = np.float32(0.0)
    for index in range(length):
        weight = exp2((scores[head, index] - highest) * factor)
        scores[head, index] = weight
        total += weight
    share = np.float32(1.0) / total
    for index in range(length):
        scores[head, index] *= share


@compiled()
def prefetch_head(cached: Any, slot: int, kv_first: int, kv_stop: int) -> None:
    """Fetch the heads of one slot: blocks lie anywhere, and a processor foresees nothing across pages."""
    size = cached.shape[2] * cached.itemsize
    start = cached.ctypes.data + (slot * cached.shape[1] + kv_first) * size
    for line in range(0, (kv_stop - kv_first) * size, 64):
        prefetch(start + line)


# Every array below is indexed whole: a slice of one would lose that its last axis is contiguous, and with it the
# vectors. All heads of a slot lie together, so they are read together.


@compiled()
def _score_one(
    query: Any, head: int, keys: Any, at: int, kv_head: int, scores: Any, index: int
) -> None:
    total = np.float32(0.0)
    for value in range(query.shape[1]):
        total += query[head, value] * as_float(keys[at, kv_head, value])
    scores[head, index] = total


@compiled()
def _score_four(
    query: Any, head: int, keys: Any, at: int, kv_head: int, scores: Any, index: int
) -> None:
    """Score two keys, one after the other, for a head and the next, which shares them: each is widened once."""
    one = two = next_one = next_two = np.float32(0.0)
    for value in range(query.shape[1]):
        first, second = as_float(keys[at, kv_head, value]), as_float(keys[at + 1, kv_head, value])
        one += query[head, value] * first
        two += query[head, value] * second
        next_one += query[head + 1, value] * first
        next_two += query[head + 1, value] * second
    scores[head, index], scores[head, index + 1] = one, two
    scores[head + 1, index], scores[head + 1, index + 1] = next_one, next_two


@compiled()
def _score(
    query: Any,
    keys: Any,
    table: Any,
    kv_first: int,
    kv_stop: int,
    length: int,
    block_size: int,
    scores: Any,
) -> None:
    """Write the products of the queries [heads, head dim] with every key into `scores` [heads, length]."""
    heads = len(query)
    group = heads // (kv_stop - kv_first)
    for first in range(0, length, block_size):
        slot = table[first // block_size] * block_size - first
        ahead = min(first + block_size, length - 1) // block_size
        further = table[ahead] * block_size - first
        stop = min(first + block_size, length)
        for index in range(first, stop - 1, 2):
            for more in range(2):
                prefetch_head(keys, further + index + more, kv_first, kv_stop)
            for kv_head in range(kv_first, kv_stop):
                head = (kv_head - kv_first) * group
                last = head + group - 1
                while head < last:
                    _score_four(query, head, keys, slot + index, kv_head, scores, index)
                    head += 2
                if head == last:
                    for more in range(2):
                        at = slot + index + more
                        _score_one(query, head, keys, at, kv_head, scores, index + more)
        for index in range(stop - (stop - first) % 2, stop):
            for head in range(heads):
                kv_head = kv_first + head // group
                _score_one(query, head, keys, slot + index, kv_head, scores, index)


@compiled()
def _add_four(
    weights: Any, index: int, values: Any, at: int, kv_head: int, head: int, summed: Any
) -> None:
    """Add four values to what one head has summed: the sums are read and written once for all of them."""
    one, two = weights[head, index], weights[head, index + 1]
    three, four = weights[head, index + 2], weights[head, index + 3]
    for value in range(summed.shape[1]):
        summed[head, value] += (
            one * as_float(values[at, kv_head, value])
            + two * as_float(values[at + 1, kv_head, value])
            + three * as_float(values[at + 2, kv_head, value])
            + four * as_float(values[at + 3, kv_head, value])
        )


@compiled()
def _add_four_to_two(
    weights: Any, index: int, values: Any, at: int, kv_head: int, head: int, summed: Any
) -> None:
    """As `_add_four`, for this head and the next, which shares its values: they are widened once."""
    one, two = weights[head, index], weights[head, index + 1]
    three, four = weights[head, index + 2], weights[head, index + 3]
    next_one, next_two = weights[head + 1, index], weights[head + 1, index + 1]
    next_three, next_four = weights[head + 1, index + 2], weights[head + 1, index + 3]
    for value in range(summed.shape[1]):
        first = as_float(values[at, kv_head, value])
        second = as_float(values[at + 1, kv_head, value])
        third = as_float(values[at + 2, kv_head, value])
        fourth = as_float(values[at + 3, kv_head, value])
        summed[head, value] += one * first + two * second + three * third + four * fourth
        summed[head + 1, value] += (
            next_one * first + next_two * second + next_three * third + next_four * fourth
        )


@compiled()
def _combine(
    weights: Any,
    values: Any,
    table: Any,
    kv_first: int,
    kv_stop: int,
    length: int,
    block_size: int,
    summed: Any,
) -> None:
    """Add every value, times its weight [heads, length], to `summed` [heads, head dim]."""
    heads, head_dim = summed.shape
    group = heads // (kv_stop - kv_first)
    for first in range(0, length, block_size):
        slot = table[first // block_size] * block_size - first
        ahead = min(first + block_size, length - 1) // block_size
        further = table[ahead] * block_size - first
        stop = min(first + block_size, length)
        for index in range(first, stop - 3, 4):
            for more in range(4):
                prefetch_head(values, further + index + more, kv_first, kv_stop)
            for kv_head in range(kv_first, kv_stop):
                head = (kv_head - kv_first) * group
                last = head + group - 1
                while head < last:
                    _add_four_to_two(weights, index, values, slot + index, kv_head, head, summed)
                    head += 2
                if head == last:
                    _add_four(weights, index, values, slot + index, kv_head, head, summed)
        for index in range(stop - (stop - first) % 4, stop):
            for head in range(heads):
                kv_head = kv_first + head // group
                weight = weights[head, index]
                for value in range(head_dim):
                    summed[head, value] += weight * as_float(values[slot + index, kv_head, value])


@compiled()
def attend_scaled(
    query: Any,
    keys: Any,
    values: Any,
    table: Any,
    kv_first: int,
    kv_stop: int,
    length: int,
    block_size: int,
    summed: Any,
) -> None:
    """Attend for queries [heads, head dim] of the key heads from `kv_first` on; adds to `summed`, of the same shape."""
    heads = len(query)
    scores = np.empty((heads, length), dtype=np.float32)
    _score(query, keys, table, kv_first, kv_stop, length, block_size, scores)
    for head in range(heads):
        softmax(scores, head, length, LOG2_E)
    _combine(scores, values, table, kv_first, kv_stop, length, block_size, summed)


@compiled()
def _attend_row(
    query: Any,
    keys: Any,
    values: Any,
    table: Any,
    row: int,
    kv_first: int,
    kv_stop: int,
    length: int,
    block_size: int,
    scaling: Any,
    out: Any,
) -> None:
    """Attend for the query heads of one row that share some key heads."""
    group, head_dim = query.shape[1] // keys.shape[1], query.shape[2]
    first, heads = kv_first * group, (kv_stop - kv_first) * group
    scaled = np.empty((heads, head_dim), dtype=np.float32)
    summed = np.zeros((heads, head_dim), dtype=np.float32)
    for head in range(heads):
        for value in range(head_dim):
            scaled[head, value] = query[row, first + head, value] * scaling
    attend_scaled(scaled, keys, values, table, kv_first, kv_stop, length, block_size, summed)
    for head in range(heads):
        for value in range(head_dim):
            out[row, first + head, value] = summed[head, value]


# Two functions, since the cache on disk tells functions apart by their names and not by how they are compiled.


@compiled()
def _attend_serial(
    query: Any,
    keys: Any,
    values: Any,
    tables: Any,
    contexts: Any,
    block_size: int,
    scaling: Any,
    parts: int,
    out: Any,
) -> None:
    share = keys.shape[1] // parts
    for task in range(query.shape[0] * parts):
        row, first = task // parts, task % parts * share
        _attend_row(
            query,
            keys,
            values,
            tables[row],
            row,
            first,
            first + share,
            contexts[row],
            block_size,
            scaling,
            out,
        )


@compiled(parallel=True)
def _attend_parallel(
    query: Any,
    keys: Any,
    values: Any,
    tables: Any,
    contexts: Any,
    block_size: int,
    scaling: Any,
    parts: int,
    out: Any,
) -> None:
    share = keys.shape[1] // parts
    for task in numba.prange(query.shape[0] * parts):
        row, first = task // parts, task % parts * share
        _attend_row(
            query,
            keys,
            values,
            tables[row],
            row,
            first,
            first + share,
            contexts[row],
            block_size,
            scaling,
            out,
        )


def parts_of(rows: int, kv_heads: int, threads: int) -> int:
    """Return how many parts the key heads of a row make: threads that have no rows of their own share one."""
    return kv_heads if threads > 1 and rows < TASKS_MIN * threads else 1


def use_threads(threads: int) -> None:
    """Let parallel kernels run on so many threads."""
    if threads > 1:
        limits: Any = numba.config
        numba.set_num_threads(min(threads, limits.NUMBA_NUM_THREADS))


class NumbaDecode:
    """The kernel, compiled for one type."""

    def __init__(self, dtype: torch.dtype, threads: int) -> None:
        self._dtype = dtype
        self._threads = threads
        self._attend = _attend_serial if threads == 1 else _attend_parallel
        use_threads(threads)
        self._warm_up()

    def _warm_up(self) -> None:
        """Compile now, so that the first request does not wait for it."""
        cached = np.zeros((2, 1, 2), dtype=np.uint16 if self._is_half else np.float32)
        query = np.zeros((1, 1, 2), dtype=np.float32)
        self._attend(
            query,
            cached,
            cached,
            np.zeros((1, 1), dtype=np.int32),
            np.ones(1, dtype=np.int32),
            2,
            np.float32(1.0),
            1,
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
        given: npt.NDArray[np.float32] = query.float().contiguous().numpy()
        out = np.empty(given.shape, dtype=np.float32)
        self._attend(
            given,
            keys,
            values,
            step.tables,
            step.contexts,
            step.cache.block_size,
            np.float32(scaling),
            parts_of(len(given), keys.shape[1], self._threads),
            out,
        )
        return torch.from_numpy(out).to(self._dtype)
