"""Per-slot state of a generate rank, all of it described by one table of fields.

Whatever happens to a slot goes through the table, so a field cannot be forgotten.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

STOP_TOKENS_MAX = 16
"""Stop tokens of one request, its own and the checkpoint's together."""


class Field(NamedTuple):
    """One per-slot array: its name, type, the value of an empty slot, and its width (0: a scalar)."""

    name: str
    dtype: type[np.generic]
    empty: int
    width: int


class SlotTable:
    """The slots of one rank.

    Shape: every array has one row a slot. `tokens` holds prompt and outputs, `length` of them valid; `block_table` the
    KV blocks, `block_count` of them valid. `decoding` tells that the slot yields a token in every step.
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
            # One more than the context: a step ahead, a slot may grow that has just finished.
            Field("block_table", np.int32, 0, -(-context_tokens // block_size) + 1),
            Field("tokens", np.int32, 0, context_tokens),
        )
        for one in self.fields:
            setattr(self, one.name, _empty_rows(one, slots))

    def reset(self, slot: int) -> None:
        """Empty a slot. The wide fields need no clearing: nothing past their counts is read."""
        for name, _, empty, width in self.fields:
            if width <= STOP_TOKENS_MAX:
                getattr(self, name)[slot] = empty

    def swap(self, one: int, other: int) -> None:
        """Exchange two slots.

        The rank itself never moves a sequence: slots are what decisions name. This is for plug-ins that keep their
        batches contiguous over a table of their own.
        """
        for name, *_ in self.fields:
            rows = getattr(self, name)
            rows[[one, other]] = rows[[other, one]]

    def resize(self, slots: int) -> None:
        """Have this many slots: new ones are empty, the last ones go with what they hold. For plug-ins, as `swap`.

        The arrays are new ones; a view of a row that was taken before is of the past.
        """
        for field in self.fields:
            old = getattr(self, field.name)
            rows = _empty_rows(field, slots)
            kept = min(slots, len(old))
            rows[:kept] = old[:kept]
            setattr(self, field.name, rows)


def _empty_rows(field: Field, slots: int) -> npt.NDArray[np.generic]:
    shape = (slots, field.width) if field.width else (slots,)
    # zeros() commits memory only where it is written: the wide fields stay cheap.
    if field.empty == 0:
        return np.zeros(shape, field.dtype)
    return np.full(shape, field.empty, field.dtype)
