"""Per-slot state of a generate rank, described by one table of fields, and its decode rows.

All changes of a slot go through the table, so no field can be forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vsched.types import FinishReason
from vsched.worker.contract import SequenceState

Int32s = npt.NDArray[np.int32]

STOP_TOKENS_MAX = 16
"""Maximum number of stop tokens of a request, including the checkpoint's."""


class Field(NamedTuple):
    """One per-slot array: its name, type, the value of an empty slot, and its width (0: a scalar)."""

    name: str
    dtype: type[np.generic]
    empty: int
    width: int


class SlotTable:
    """The slots of one rank.

    Shape: every array has one row per slot. `tokens` has prompt and outputs, `length` of them valid; `block_table` the
    KV blocks, `block_count` of them valid. `decoding` is True if the slot has a decode row in every step.
    """

    number: npt.NDArray[np.int32]
    decoding: npt.NDArray[np.bool_]
    length: npt.NDArray[np.int32]
    length_min: npt.NDArray[np.int32]
    length_max: npt.NDArray[np.int32]
    last_token: npt.NDArray[np.int32]
    stop_tokens: npt.NDArray[np.int32]
    block_count: npt.NDArray[np.int32]
    block_table: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]

    def __init__(self, slots: int, *, context_tokens: int, block_size: int) -> None:
        self.fields = (
            Field("number", np.int32, -1, 0),
            Field("decoding", np.bool_, 0, 0),
            Field("length", np.int32, 0, 0),
            Field("length_min", np.int32, 0, 0),
            Field("length_max", np.int32, 0, 0),
            Field("last_token", np.int32, -1, 0),
            Field("stop_tokens", np.int32, -1, STOP_TOKENS_MAX),
            Field("block_count", np.int32, 0, 0),
            # One more than the context: with a step in flight, a slot that has just finished may grow.
            Field("block_table", np.int32, 0, -(-context_tokens // block_size) + 1),
            Field("tokens", np.int32, 0, context_tokens),
        )
        for one in self.fields:
            setattr(self, one.name, _empty_rows(one, slots))

    def reset(self, slot: int) -> None:
        """Empty a slot; wide fields are not cleared, because they are not read beyond their counts."""
        for name, _, empty, width in self.fields:
            if width <= STOP_TOKENS_MAX:
                getattr(self, name)[slot] = empty

    def swap(self, one: int, other: int) -> None:
        """Exchange two slots.

        For plug-ins that keep contiguous batches in a table of their own; the rank itself never moves sequences,
        because decisions refer to slots.
        """
        for name, *_ in self.fields:
            rows = getattr(self, name)
            rows[[one, other]] = rows[[other, one]]

    def resize(self, slots: int) -> None:
        """Set the number of slots: new ones are empty, and the last ones are removed. For plug-ins, like `swap`.

        The arrays are replaced, so earlier views become stale.
        """
        for field in self.fields:
            old = getattr(self, field.name)
            rows = _empty_rows(field, slots)
            kept = min(slots, len(old))
            rows[:kept] = old[:kept]
            setattr(self, field.name, rows)


def _empty_rows(field: Field, slots: int) -> npt.NDArray[np.generic]:
    shape = (slots, field.width) if field.width else (slots,)
    # zeros() allocates pages only when they are written, so wide fields are cheap.
    if field.empty == 0:
        return np.zeros(shape, field.dtype)
    return np.full(shape, field.empty, field.dtype)


class SteadyRows:
    """The decode rows in ascending order of slots, kept from step to step.

    While the set of decoding requests does not change, each row advances by one token with a few array operations;
    building the rows from the table takes a good part of a small model's step. Any change of the rows invalidates them
    (`GenerateRank` does), and the next step builds them again.

    Attributes:
        slots: int32 [rows]; `listed` is the same as a list.
        sequences: The sequences of the slots.
        tokens: int32 [rows], the last token of each.
        positions: int32 [rows], the KV position of each, equal to the number of tokens before it.
    """

    def __init__(self, table: SlotTable, in_slot: Mapping[int, SequenceState]) -> None:
        """Build the rows from the table."""
        self.slots = np.flatnonzero(table.decoding).astype(np.int32)
        self.listed: list[int] = self.slots.tolist()
        self.sequences: Sequence[SequenceState] = [in_slot[slot] for slot in self.listed]
        self.tokens: Int32s = table.last_token[self.slots]
        self.positions: Int32s = table.length[self.slots] - 1
        self._table = table
        self._stops = table.stop_tokens[self.slots]
        self._length_min = table.length_min[self.slots]
        self._length_max = table.length_max[self.slots]
        self._by_slot = np.full(len(table.number), -1, np.int32)
        self._numbers = table.number.tobytes()

    def advance(self, tokens: Int32s) -> dict[int, FinishReason]:
        """Add a token to each slot; return finish reasons by row."""
        table, slots = self._table, self.slots
        lengths = self.positions + 2
        table.tokens[slots, np.minimum(lengths - 1, table.tokens.shape[1] - 1)] = tokens
        table.length[slots] = lengths
        table.last_token[slots] = tokens
        self.positions, self.tokens = lengths - 1, tokens.copy()  # the worker may reuse its array
        stopped = (self._stops == tokens[:, None]).any(axis=1)
        stopped &= lengths >= self._length_min
        return ends_of(stopped, lengths >= self._length_max)

    def reported(self) -> tuple[bytes, bytes]:
        """Return the last tokens and the numbers of all slots, in the format of a result."""
        self._by_slot[self.slots] = self.tokens
        return self._by_slot.tobytes(), self._numbers


def ends_of(stopped: npt.NDArray[np.bool_], full: npt.NDArray[np.bool_]) -> dict[int, FinishReason]:
    """Return finish reasons by row."""
    over = stopped | full
    if not over.any():
        return {}
    return {
        index: FinishReason.STOP if stopped[index] else FinishReason.LENGTH
        for index in np.flatnonzero(over).tolist()
    }
