"""Per-slot state of a generate rank."""

from __future__ import annotations

import numpy as np

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
