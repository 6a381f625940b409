"""Rows of a step in the layers of a model, split into blocks whose intermediate results share memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vsched_workers.adapters.rows import PassRows
from vsched_workers.backends.reference.packed_weights import block_starts
from vsched_workers.memory.sparse_runs import pieces, room_for


def block_slices(count: int) -> Iterator[slice]:
    """Split `count` rows into blocks that are multiplied at once."""
    starts = block_starts(count)
    for start in pieces(starts):
        yield slice(start, min(start + starts.step, count))


class StepRows:
    """Rows of a step, split into blocks.

    Shape: hidden, normed [rows, hidden], attended [rows, heads * head_dim].

    Attributes:
        adapted: Rows with adapters; None if there are none.
    """

    adapted: PassRows | None = None

    def __init__(self, hidden: torch.Tensor, attended: torch.Tensor) -> None:
        self.hidden = hidden
        self.attended = attended
        self.normed = room_for(hidden, *hidden.shape)
        # Decode rows come first, so blocks skipped by a sparse run take no longer than computed
        # ones.
        self.blocks = [
            RowBlock(part.start, *(whole[part] for whole in (hidden, self.normed, attended)))
            for part in block_slices(len(hidden))
        ]

    def only(self, wanted: torch.Tensor) -> StepRows:
        """Select some of the rows; their norms are lost."""
        rows = StepRows(self.hidden[wanted], self.attended[wanted])
        if self.adapted is not None:
            rows.adapted = self.adapted.only(wanted.numpy())
        return rows


class RowBlock:
    """Block of rows, from `start` on, and its addresses."""

    __slots__ = ("attended", "hidden_at", "normed", "normed_at", "rows", "start", "stop")

    def __init__(
        self, start: int, hidden: torch.Tensor, normed: torch.Tensor, attended: torch.Tensor
    ) -> None:
        self.start = start
        self.rows = len(hidden)
        self.stop = start + self.rows
        self.normed = normed
        self.attended = attended
        self.hidden_at = hidden.data_ptr()
        self.normed_at = normed.data_ptr()
