"""Attention of many rows in bfloat16: chunks of prompts over the paged cache, and the patches of images.

For a row of queries q and the keys it sees,

    s_t = q . k_t,   w_t = 2**(factor (s_t - max s)),   out = sum_t w_t v_t / sum_t w_t

With bfloat16 operands (VDPBF16PS) scores and weights are rounded to bfloat16, as transformers' own eager attention
rounds them; with float32 operands nothing is rounded but the result.

**Layout.** Keys and values are packed once, straight from the paged cache, into panels that rows are multiplied with
(see `gemm.py`): for each key head and sequence

    keys    [keys / 64, head dim / 2, 64, 2]
    values  per panel of 64, 32 or 16 columns c:  [keys / 2, c, 2]

with the keys padded to whole panels. Then 24 rows at a time are multiplied with all keys that they see, their softmax
is taken while the scores are in the cache, and the weights are multiplied with the values. Nothing is compiled for a
shape. What a row gets depends neither on how its prompt is cut nor on the rows beside it.
"""

# numba compiles these functions: to a type checker they are untyped, and their loops are meant to be loops.
# mypy: disable-error-code="untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]

from vsched_workers.backends.cpu.kernels.bf16 import (
    BF16,
    as_type_of,
    bf16_array,
    exp,
    exp2,
    larger,
    narrow,
    widen,
)
from vsched_workers.backends.cpu.kernels.compilation import compiled, emits
from vsched_workers.backends.cpu.kernels.gemm import PANEL, PASS_ROWS, Pass, read_row
from vsched_workers.backends.cpu.kernels.simd import (
    LANES,
    LINE,
    LONG,
    WORD,
    InstructionWriter,
    cases,
    has_avx512,
)
from vsched_workers.backends.cpu.kernels.thread_pool import spread

BLOCK = 4 * PASS_ROWS
"""Rows that are computed at once: a panel is read for all of them, and their scores stay in the cache."""


class PrefillArguments(NamedTuple):
    """Sequences of one length, each row of which attends to the keys of its own sequence. `..._at` is an address.

    Attributes:
        query_at: The queries, [heads, sequences, rows, head dim]; heads are `query_head_bytes` apart.
        query_head_bytes: Bytes from a head to the next.
        heads: Query heads, a multiple of `kv_heads`.
        sequences: Number of sequences.
        rows: Rows of each sequence, at least one.
        head_dim: A multiple of 16.
        keys_at: The keys. Those of head h and sequence s begin at `h * head_bytes + s * len(slots) * slot_bytes`.
        values_at: The values, which lie as keys do.
        slot_bytes: Bytes from a slot to the next.
        head_bytes: Bytes from a key head to the next.
        kv_heads: Key heads.
        slots: The slots of a sequence's keys, int64 [keys].
        packed_at: Room for packed keys and values, `4 * kv_heads * sequences * padded_keys * head_dim` bytes, at a
            multiple of 64; in tiles, of padded heads.
        padded_keys: Keys of a sequence, padded to whole panels.
        causal: 1 has the last row see all keys, and each row one less than the next; 0 has all rows see all keys.
        window: Keys that a row sees at most, the last before it and its own; 0 for no such limit.
        factor: Scores times this, float32, are logarithms to the base 2.
        softcap: Such logarithms are bent towards plus and minus this; 0 for straight ones.
        out_at: The result, [sequences, rows, heads, head dim].
        tag: The dtype tag of the operands.
    """

    query_at: int
    query_head_bytes: int
    heads: int
    sequences: int
    rows: int
    head_dim: int
    keys_at: int
    values_at: int
    slot_bytes: int
    head_bytes: int
    kv_heads: int
    slots: npt.NDArray[np.int64]
    packed_at: int
    padded_keys: int
    causal: int
    window: int
    factor: np.float32
    softcap: np.float32
    out_at: int
    tag: npt.NDArray[Any]


# --- what is written for LLVM ---


@emits(numba.void, None, None, *[numba.intp] * 7)
def _multiply(
    builder: Any,
    kind: Any,
    out_kind: Any,
    vectors: Any,
    rows_at: Any,
    row_bytes: Any,
    panel_at: Any,
    pairs: Any,
    out_at: Any,
    out_bytes: Any,
) -> None:
    """Multiply six rows with a panel of 1, 2 or 4 vectors; rows and results are of the types of the kinds.

    Sixteen registers of 256 bits hold the sums of six rows and one vector, so its vectors follow each other there.
    """
    float32, out_float32 = (isinstance(each, numba.types.Float) for each in (kind, out_kind))
    for count in cases(builder, vectors, (1, 2, 4)):
        together = count if has_avx512() else 1
        for first in range(0, count, together):
            one = Pass(builder, PASS_ROWS, vectors=together, panel_vectors=count, float32=float32)
            weights_at = builder.add(panel_at, ir.Constant(LONG, first * LINE))
            place = ir.Constant(LONG, first * LANES * (4 if out_float32 else 2))
            sums = one.sums(rows_at, row_bytes, weights_at, pairs)
            one.store(sums, builder.add(out_at, place), out_bytes, float32=out_float32)


@emits(numba.void, *[numba.intp] * 3)
def interleave(builder: Any, first_at: Any, second_at: Any, to_at: Any) -> None:
    """Write a vector of pairs, each of a value of one row and the one below it."""
    writer = InstructionWriter(builder)
    narrow_type, wide_type = (ir.VectorType(kind, LANES) for kind in (ir.IntType(16), WORD))
    first, second = (
        builder.zext(writer.load(at, narrow_type), wide_type) for at in (first_at, second_at)
    )
    upper = builder.shl(second, ir.Constant(wide_type, [16] * LANES))
    writer.store(builder.or_(first, upper), to_at, 4)


@emits(numba.void, numba.intp, numba.intp)
def copy_pair(builder: Any, from_at: Any, to_at: Any) -> None:
    """Copy two neighbouring bfloat16 values."""
    writer = InstructionWriter(builder)
    writer.store(writer.load(from_at, WORD), to_at)


# --- packing ---


@compiled()
def vectors_of(columns: int) -> int:
    """Return the vectors of the next panel of values, of the columns that are left."""
    return 4 if columns >= 4 * LANES else 2 if columns >= 2 * LANES else 1


@compiled()
def _pack_keys(first_at: int, second_at: int, head_dim: int, to_at: int) -> None:
    """Write two keys to their columns of a panel."""
    for pair in range(head_dim // 2):
        at = to_at + pair * PANEL * 4
        copy_pair(first_at + 4 * pair, at)
        copy_pair(second_at + 4 * pair, at + 4)


@compiled()
def _pack_values(
    first_at: int, second_at: int, head_dim: int, pair: int, padded_keys: int, to_at: int
) -> None:
    """Write the values of two keys to their row of every panel of values."""
    column = 0
    while column < head_dim:
        vectors = vectors_of(head_dim - column)
        at = to_at + padded_keys * column * 2 + pair * vectors * LINE
        for vector in range(vectors):
            offset = 2 * (column + vector * LANES)
            interleave(first_at + offset, second_at + offset, at + vector * LINE)
        column += vectors * LANES


# As a call it would be told all that is given, for each pair of keys: 5 % of what short sequences take.
@compiled(inline="always")
def two_keys(given: PrefillArguments, start: int, index: int, padding_at: int) -> Any:
    """Return where a key lies and the one behind it, and their values; what is behind the last of all is padding.

    `start` is where the keys of the sequence lie, counted from those of all.
    """
    first_key = second_key = first_value = second_value = padding_at
    if index < len(given.slots):
        offset = start + given.slots[index] * given.slot_bytes
        first_key, first_value = given.keys_at + offset, given.values_at + offset
    if index + 1 < len(given.slots):
        offset = start + given.slots[index + 1] * given.slot_bytes
        second_key, second_value = given.keys_at + offset, given.values_at + offset
    return first_key, second_key, first_value, second_value


@compiled()
def _pack_panel(given: PrefillArguments, task: int) -> None:
    """Pack the keys of one panel and their values, with zeros behind the last of all."""
    panels, size = given.padded_keys // PANEL, 2 * given.head_dim
    which, panel = task // panels, task % panels
    head, sequence = which // given.sequences, which % given.sequences
    start = head * given.head_bytes + sequence * len(given.slots) * given.slot_bytes
    packed_at = given.packed_at + which * 2 * given.padded_keys * size
    padding = np.zeros(given.head_dim, dtype=np.uint16)
    for index in range(panel * PANEL, (panel + 1) * PANEL, 2):
        first_key, second_key, first_value, second_value = two_keys(
            given, start, index, padding.ctypes.data
        )
        column_at = packed_at + panel * PANEL * size + index % PANEL * 4
        _pack_keys(first_key, second_key, given.head_dim, column_at)
        values_at = packed_at + given.padded_keys * size
        _pack_values(
            first_value, second_value, given.head_dim, index // 2, given.padded_keys, values_at
        )


# --- attending ---


@compiled()
def bend(scores: Any, count: int, factor: Any, softcap: Any) -> None:
    """Replace scores s by c tanh(factor s / c)."""
    doubled = np.float32(2.0) * factor / softcap
    for index in range(count):
        share = np.float32(2.0) / (np.float32(1.0) + exp(doubled * widen(scores[index])))
        scores[index] = as_type_of(scores[0], softcap - softcap * share)


@compiled()
def _softmax(scores: Any, unseen: int, seen: int, width: int, factor: Any) -> Any:
    """Replace the scores that a row sees by weights 2**(factor (s_t - max s)), and the others by zero.

    It does not see the first `unseen` ones, and those from `seen` on. Returns what the weights are to be divided by.
    """
    before, behind = scores[:unseen], scores[seen:width]
    for index in range(len(before)):
        before[index] = 0
    for index in range(len(behind)):
        behind[index] = 0
    scores = scores[unseen:seen]
    highest = widen(scores[0])
    for index in range(len(scores)):
        highest = larger(highest, widen(scores[index]))
    total = np.float32(0.0)
    for index in range(len(scores)):
        weight = exp2((widen(scores[index]) - highest) * factor)
        scores[index] = as_type_of(scores[0], weight)
        total += weight
    return total


@compiled()
def _score(queries: Any, keys_at: int, width: int, scores: Any) -> None:
    """Write the products of queries, whole passes of them, with `width` keys."""
    padded_rows, head_dim = queries.shape
    kind, key_bytes = queries[0, 0], 2 * head_dim
    for key in range(0, width, PANEL):
        for row in range(0, padded_rows, PASS_ROWS):
            _multiply(
                kind,
                kind,
                PANEL // LANES,
                queries[row].ctypes.data,
                queries.strides[0],
                keys_at + key * key_bytes,
                head_dim // 2,
                scores[row].ctypes.data + key * scores.itemsize,
                scores.strides[0],
            )


@compiled()
def _combine(
    weights: Any, first: int, width: int, values_at: int, padded_keys: int, summed: Any
) -> None:
    """Write the products of weights, whole passes of them, with the values of `width` keys from `first` on."""
    padded_rows, head_dim = summed.shape
    column = 0
    while column < head_dim:
        vectors = vectors_of(head_dim - column)
        for row in range(0, padded_rows, PASS_ROWS):
            _multiply(
                weights[0, 0],
                summed[0, 0],
                vectors,
                weights[row].ctypes.data,
                weights.strides[0],
                values_at + padded_keys * column * 2 + first // 2 * vectors * LINE,
                width // 2,
                summed[row].ctypes.data + column * summed.itemsize,
                summed.strides[0],
            )
        column += vectors * LANES


@compiled()
def _read_rows(rows_at: int, rows: int, head_dim: int, tag: Any) -> Any:
    """Return rows of bfloat16 in the type of the tag, and zeros below them: [whole passes, head dim]."""
    padded_rows = (rows + PASS_ROWS - 1) // PASS_ROWS * PASS_ROWS
    copied = np.zeros((padded_rows, head_dim), dtype=tag.dtype)
    for row in range(rows):
        read_row(rows_at + row * 2 * head_dim, copied[row])
    return copied


@compiled()
def block_of(given: PrefillArguments, task: int, block: int, panel: int) -> Any:
    """Return which rows of which head a task of `block` rows is about, and what they see.

    That is: the head; the first of its rows, of all sequences, and how many there are; the keys that the first one
    sees, without those that are skipped, which none sees, whole panels of so many; the width of what all see, in whole
    panels; and which of the packed keys.
    """
    blocks = (given.rows + block - 1) // block
    which, first = task // blocks, task % blocks * block
    head, sequence = which // given.sequences, which % given.sequences
    start, rows = sequence * given.rows + first, min(block, given.rows - first)
    seen = len(given.slots) - (given.rows - 1 - first) * given.causal
    # No row of the block sees what lies before the first one's window.
    skipped = (max(seen - given.window, 0) // panel * panel) if given.window else 0
    seen -= skipped
    width = (seen + (rows - 1) * given.causal + panel - 1) // panel * panel
    packed = head // (given.heads // given.kv_heads) * given.sequences + sequence
    return head, start, rows, seen, skipped, width, packed


@compiled()
def write_attended(out_at: int, summed: Any, total: Any) -> None:
    """Write what a row makes of the values: their weighted sums by the sum of the weights, rounded."""
    out, share = bf16_array(out_at, len(summed)), np.float32(1.0) / total
    for index in range(len(summed)):
        out[index] = narrow(summed[index] * share)


@compiled()
def _attend_block(given: PrefillArguments, task: int) -> None:
    """Attend for the rows of one block, which are of one head and sequence."""
    head_dim, size = given.head_dim, 2 * given.head_dim
    head, start, rows, seen, skipped, width, packed = block_of(given, task, BLOCK, PANEL)
    keys_at = given.packed_at + packed * 2 * given.padded_keys * size
    query_at = given.query_at + head * given.query_head_bytes + start * size
    queries = _read_rows(query_at, rows, head_dim, given.tag)
    # A vector apart, or the rows of a pass would lie where the cache has few places for them.
    scores = np.empty((len(queries), width + LANES), dtype=given.tag.dtype)
    _score(queries, keys_at + skipped * size, width, scores)
    factor = given.factor
    if given.softcap > np.float32(0.0):
        factor = np.float32(1.0)
        for row in range(rows):
            bend(scores[row], width, given.factor, given.softcap)
    totals = np.empty(rows, dtype=np.float32)
    for row in range(rows):
        stop = seen + row * given.causal
        unseen = max(stop - given.window, 0) if given.window else 0
        totals[row] = _softmax(scores[row], unseen, stop, width, factor)
    summed = np.empty((len(queries), head_dim), dtype=np.float32)
    values_at = keys_at + given.padded_keys * size
    _combine(scores, skipped, width, values_at, given.padded_keys, summed)
    for row in range(rows):
        out_at = given.out_at + ((start + row) * given.heads + head) * size
        write_attended(out_at, summed[row], totals[row])


@compiled()
def _pack_panels(first: int, stop: int, given: PrefillArguments) -> None:
    for task in range(first, stop):
        _pack_panel(given, task)


@compiled()
def _attend_blocks(first: int, stop: int, given: PrefillArguments) -> None:
    for task in range(first, stop):
        _attend_block(given, task)


@compiled()
def attend(pool: int, given: PrefillArguments) -> None:
    """Attend as `given` says."""
    pieces = given.kv_heads * given.sequences * (given.padded_keys // PANEL)
    spread(pool, pieces, 4, _pack_panels, (given,))
    blocks = given.heads * given.sequences * ((given.rows + BLOCK - 1) // BLOCK)
    spread(pool, blocks, 1, _attend_blocks, (given,))


def no_arguments(tag: npt.NDArray[Any] = BF16) -> PrefillArguments:
    """Return arguments with which there is nothing to do, to compile for."""
    return PrefillArguments(
        query_at=0,
        query_head_bytes=0,
        heads=1,
        sequences=0,
        rows=1,
        head_dim=LANES,
        keys_at=0,
        values_at=0,
        slot_bytes=0,
        head_bytes=0,
        kv_heads=1,
        slots=np.empty(0, dtype=np.int64),
        packed_at=0,
        padded_keys=0,
        causal=0,
        window=0,
        factor=np.float32(1.0),
        softcap=np.float32(0.0),
        out_at=0,
        tag=tag,
    )


def warm_up(tag: npt.NDArray[Any]) -> None:
    """Compile for a dtype tag, so that the first request does not wait for it."""
    attend(0, no_arguments(tag))
