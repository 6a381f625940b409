"""Decode attention over a paged cache of bfloat16, for one row and the query heads that share some key heads.

Where the processor multiplies pairs of bfloat16 (see `kernels/vectors.py`), sixteen keys are scored at a time: the sums
of all sixteen are kept in registers and added up across lanes together, which by itself costs more than the products.
Values are added up for up to four heads at a time, which share them. Elsewhere, or where heads or blocks have other
sizes, `decode_attention.py` does both.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]

from vsched_workers.backends.cpu.decode_attention import (
    LOG2_E,
    attend_scaled,
    prefetch_head,
    softmax,
)
from vsched_workers.backends.cpu.kernels.elementwise import halves
from vsched_workers.backends.cpu.kernels.numba_basics import as_float, compiled
from vsched_workers.backends.cpu.kernels.vectors import (
    HALVES,
    LANES,
    LINE,
    LONG,
    NOTHING,
    PAIR,
    PAIRS,
    SINGLE,
    SINGLES,
    WORD,
    Loop,
    Writer,
    can_multiply,
)

KEYS = LANES
"""Keys that are scored at a time."""
COLUMNS = 4 * LANES
"""Values of a head that are added up at a time, for up to four heads: all sums fill half of the registers."""


def _scoring(
    _context: Any, _query_at: Any, _keys_at: Any, _key_bytes: Any, _parts: Any, _scores_at: Any
) -> Any:
    """Write the products of a query of so many vectors of pairs with 16 keys, which lie `key_bytes` apart."""

    def make(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        query_at, keys_at, key_bytes, parts, scores_at = arguments
        writer = Writer(builder)
        loop = Loop(builder, [NOTHING] * KEYS)
        query = writer.load(writer.moved(query_at, loop.index, LINE), PAIRS)
        first_at = writer.moved(keys_at, loop.index, LINE)
        sums = [
            writer.multiply(
                total, query, writer.load(writer.moved(first_at, key_bytes, key), PAIRS)
            )
            for key, total in enumerate(loop.carried)
        ]
        loop.end(sums, parts)
        writer.store(_added_across(builder, sums), scores_at, 4)

    return numba.void(*[numba.intp] * 5), make


def _added_across(builder: Any, vectors: list[Any]) -> Any:
    """Return one vector whose lanes are the sums of 16 vectors.

    Each turn adds lanes that lie `apart`, of two vectors at once: half of the lanes are left to each of them.
    """
    apart = 1
    while len(vectors) > 1:
        lower, upper = [], []
        for lane in range(LANES):
            own = not lane & apart
            lower.append(lane if own else LANES + lane - apart)
            upper.append(lane + apart if own else LANES + lane)
        masks = [ir.Constant(ir.VectorType(WORD, LANES), each) for each in (lower, upper)]
        vectors = [
            builder.fadd(*(builder.shuffle_vector(one, other, mask) for mask in masks))
            for one, other in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        apart *= 2
    return vectors[0]


def _combining(
    _context: Any,
    _heads: Any,
    _weights_at: Any,
    _weight_bytes: Any,
    _values_at: Any,
    _value_bytes: Any,
    _count: Any,
    _sums_at: Any,
    _sum_bytes: Any,
) -> Any:
    """Add 64 columns of so many values, times the weights of 1, 2 or 4 heads, to the sums of these heads."""

    def make(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        heads, *others = arguments
        end = builder.append_basic_block("end")
        switch = builder.switch(heads, end)
        for count in (1, 2, 4):
            block = builder.append_basic_block("heads")
            switch.add_case(ir.Constant(LONG, count), block)
            builder.position_at_end(block)
            _write_combining(builder, count, others)
            builder.branch(end)
        builder.position_at_end(end)

    return numba.void(*[numba.intp] * 8), make


def _write_combining(builder: Any, heads: int, arguments: Any) -> None:
    weights_at, weight_bytes, values_at, value_bytes, count, sums_at, sum_bytes = arguments
    writer, one = Writer(builder), ir.Constant(LONG, 1)
    vectors = range(COLUMNS // LANES)
    places = [
        writer.moved(writer.moved(sums_at, sum_bytes, head), one, vector * LINE)
        for head in range(heads)
        for vector in vectors
    ]
    loop = Loop(builder, [writer.load(at, SINGLES, 4) for at in places])
    value_at = builder.add(values_at, builder.mul(loop.index, value_bytes))
    values = [
        builder.fpext(writer.load(writer.moved(value_at, one, vector * LINE // 2), HALVES), SINGLES)
        for vector in vectors
    ]
    sums: list[Any] = []
    for head in range(heads):
        weight_at = writer.moved(writer.moved(weights_at, weight_bytes, head), loop.index, 4)
        weight = writer.repeated(writer.load(weight_at, ir.FloatType(), 4))
        for value in values:
            total = loop.carried[len(sums)]
            product = builder.fmul(weight, value, flags=("contract",))
            sums.append(builder.fadd(total, product, flags=("contract",)))
    loop.end(sums, count)
    for total, at in zip(sums, places, strict=True):
        writer.store(total, at, 4)


_score: Any = numba.extending.intrinsic(_scoring)
_combine: Any = numba.extending.intrinsic(_combining)


def scored_type(head_dim: int, block_size: int) -> npt.NDArray[Any]:
    """Return an array of the type that keys are scored in here: uint16 for pairs where sizes suit them, or float32."""
    suits = can_multiply() and not head_dim % COLUMNS and not block_size % KEYS
    return PAIR if suits else SINGLE


@compiled()
def _slot_of(table: Any, token: int, block_size: int) -> int:
    """Return where a token lies; the others of its vector of keys lie behind it."""
    slot: int = table[token // block_size] * block_size + token % block_size
    return slot


@compiled()
def _prefetch_next(
    cached: Any, table: Any, first: int, length: int, block_size: int, kv_first: int, kv_stop: int
) -> None:
    """Fetch what comes after some keys or values."""
    following = first + KEYS
    if following < length:
        slot = _slot_of(table, following, block_size)
        for index in range(min(KEYS, length - following)):
            prefetch_head(cached, slot + index, kv_first, kv_stop)


@compiled()
def _score_all(
    query_at: int,
    keys: Any,
    table: Any,
    kv_first: int,
    kv_stop: int,
    length: int,
    block_size: int,
    scores: Any,
) -> None:
    """Write the products of queries with all keys to `scores` [heads, whole vectors of keys]."""
    heads, size = len(scores), 2 * keys.shape[2]
    group, slot_bytes = heads // (kv_stop - kv_first), keys.shape[1] * size
    for first in range(0, length, KEYS):
        at = keys.ctypes.data + _slot_of(table, first, block_size) * slot_bytes + kv_first * size
        _prefetch_next(keys, table, first, length, block_size, kv_first, kv_stop)
        for head in range(heads):
            to = scores.ctypes.data + (head * scores.shape[1] + first) * 4
            key_at = at + head // group * size
            _score(query_at + head * size, key_at, slot_bytes, size // LINE, to)


@compiled()
def _combine_all(
    weights: Any,
    values: Any,
    table: Any,
    kv_first: int,
    kv_stop: int,
    length: int,
    block_size: int,
    summed: Any,
) -> None:
    """Add all values, times the weights [heads, whole vectors of keys], to `summed` [heads, head dim]."""
    heads, head_dim = summed.shape
    size, weight_bytes = 2 * head_dim, 4 * weights.shape[1]
    group, slot_bytes = heads // (kv_stop - kv_first), values.shape[1] * size
    for first in range(0, length, KEYS):
        at = values.ctypes.data + _slot_of(table, first, block_size) * slot_bytes + kv_first * size
        _prefetch_next(values, table, first, length, block_size, kv_first, kv_stop)
        count = min(KEYS, length - first)
        head = 0
        while head < heads:
            left = group - head % group
            take = 4 if left >= 4 else 2 if left >= 2 else 1
            for column in range(0, head_dim, COLUMNS):
                _combine(
                    take,
                    weights.ctypes.data + head * weight_bytes + first * 4,
                    weight_bytes,
                    at + head // group * size + column * 2,
                    slot_bytes,
                    count,
                    summed.ctypes.data + (head * head_dim + column) * 4,
                    head_dim * 4,
                )
            head += take


@compiled()
def _attend_pairs(
    query_at: int,
    keys: Any,
    values: Any,
    table: Any,
    kv_first: int,
    kv_stop: int,
    length: int,
    block_size: int,
    scaling: Any,
    summed: Any,
) -> None:
    # What is scored behind the last token of a block is nobody's, and left out of the softmax.
    scores = np.empty((len(summed), (length + KEYS - 1) // KEYS * KEYS), dtype=np.float32)
    _score_all(query_at, keys, table, kv_first, kv_stop, length, block_size, scores)
    for head in range(len(summed)):
        softmax(scores, head, length, scaling * LOG2_E)
    _combine_all(scores, values, table, kv_first, kv_stop, length, block_size, summed)


@compiled()
def _attend_plain(
    query_at: int,
    keys: Any,
    values: Any,
    table: Any,
    kv_first: int,
    kv_stop: int,
    length: int,
    block_size: int,
    scaling: Any,
    summed: Any,
) -> None:
    heads, head_dim = summed.shape
    query = np.empty((heads, head_dim), dtype=np.float32)
    for head in range(heads):
        turned = halves(query_at + head * 2 * head_dim, head_dim)
        for index in range(head_dim):
            query[head, index] = as_float(turned[index]) * scaling
    attend_scaled(query, keys, values, table, kv_first, kv_stop, length, block_size, summed)


def attend_row(
    like: Any,
    query_at: int,
    keys: Any,
    values: Any,
    table: Any,
    kv_first: int,
    kv_stop: int,
    length: int,
    block_size: int,
    scaling: Any,
    summed: Any,
) -> None:
    """Attend for queries [heads, head dim] at an address to the first `length` tokens of the blocks in `table`.

    They are those of the key heads from `kv_first` to `kv_stop`. Adds to `summed`, float32 [heads, head dim]. `like` is
    an array of the type that keys are scored in, see `scored_type`. Only what is asked for is compiled.
    """
    raise NotImplementedError


@numba.extending.overload(attend_row, inline="always")
def _choose(
    like: Any,
    query_at: Any,
    keys: Any,
    values: Any,
    table: Any,
    kv_first: Any,
    kv_stop: Any,
    length: Any,
    block_size: Any,
    scaling: Any,
    summed: Any,
) -> Any:
    chosen = _attend_plain if isinstance(like.dtype, numba.types.Float) else _attend_pairs

    def attend(
        like: Any,
        query_at: Any,
        keys: Any,
        values: Any,
        table: Any,
        kv_first: Any,
        kv_stop: Any,
        length: Any,
        block_size: Any,
        scaling: Any,
        summed: Any,
    ) -> None:
        chosen(
            query_at, keys, values, table, kv_first, kv_stop, length, block_size, scaling, summed
        )

    return attend
