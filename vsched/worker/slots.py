"""Per-slot state of a generate rank, and its decode rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from vsched.types import FinishReason
from vsched.worker.contract import SequenceState

Int32s = npt.NDArray[np.int32]

STOP_TOKENS_MAX = 16
"""Maximum number of stop tokens of a request, including the checkpoint's."""


class SlotTable:
    """The slots of one rank.

    Shape: every array has one row per slot. `tokens` has prompt and outputs, `length` of them valid; `block_table` the
    KV blocks, `block_count` of them valid. `decoding` is True if the slot has a decode row in every step.
    """

    def __init__(self, slots: int, *, context_tokens: int, block_size: int) -> None:
        self.number = np.full(slots, -1, np.int32)
        self.decoding = np.zeros(slots, np.bool_)
        self.length = np.zeros(slots, np.int32)
        self.length_min = np.zeros(slots, np.int32)
        self.length_max = np.zeros(slots, np.int32)
        self.last_token = np.full(slots, -1, np.int32)
        self.stop_tokens = np.full((slots, STOP_TOKENS_MAX), -1, np.int32)
        self.block_count = np.zeros(slots, np.int32)
        # zeros() allocates pages only when they are written, so wide arrays are cheap.
        # One block more than the context: with a step in flight, a slot that has just finished may grow.
        self.block_table = np.zeros((slots, -(-context_tokens // block_size) + 1), np.int32)
        self.tokens = np.zeros((slots, context_tokens), np.int32)

    def reset(self, slot: int) -> None:
        """Empty a slot; tokens and blocks are not cleared, because they are not read beyond their counts."""
        self.number[slot] = self.last_token[slot] = self.stop_tokens[slot] = -1
        self.decoding[slot] = False
        self.length[slot] = self.length_min[slot] = self.length_max[slot] = 0
        self.block_count[slot] = 0


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
