"""Per-slot state of a generate rank, all of it described by one table of fields.

Resetting a slot goes through the table, so a field cannot be forgotten.
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
        for name, dtype, empty, width in self.fields:
            shape = (slots, width) if width else (slots,)
            # zeros() commits memory only where it is written: the two wide fields stay cheap.
            array = np.zeros(shape, dtype) if empty == 0 else np.full(shape, empty, dtype)
            setattr(self, name, array)

    def reset(self, slot: int) -> None:
        """Empty a slot. The wide fields need no clearing: nothing past their counts is read."""
        for name, _, empty, width in self.fields:
            if width <= STOP_TOKENS_MAX:
                getattr(self, name)[slot] = empty
