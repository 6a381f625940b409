"""The rows of a step while they pass the layers of a language model, cut into blocks that are multiplied at once."""

from __future__ import annotations

import torch
from torch.nn import functional

from vsched_workers.adapters.rows import PassRows
from vsched_workers.backends.reference.packed_weights import FEW_ROWS, padded_rows
from vsched_workers.memory.sparse_runs import pieces, room_for


class StepRows:
    """The rows of a step while they pass the layers, cut into blocks that are multiplied at once.

    Shape: hidden, normed [rows, hidden], attended [rows, heads * head dim]. Rows behind the first `count` are padding.

    Attributes:
        adapted: Which of the rows have adapters; None where none has.
    """

    adapted: PassRows | None = None

    def __init__(self, hidden: torch.Tensor, attended: torch.Tensor, count: int) -> None:
        self.hidden = hidden
        self.attended = attended
        self.normed = room_for(hidden, *hidden.shape)
        self.count = count
        attended[count:] = 0
        size = FEW_ROWS[-1]
        # In a sparse run: since decode rows come first, no block takes more than the first and the last do.
        self.blocks = [
            RowBlock(
                start, *(whole[start : start + size] for whole in (hidden, self.normed, attended))
            )
            for start in pieces(range(0, len(hidden), size))
        ]

    def only(self, wanted: torch.Tensor, custom: int) -> StepRows:
        """Return some of the rows, and padding; their norms are lost."""
        count = len(wanted)
        padded = functional.pad(wanted, (0, padded_rows(count, custom=custom) - count))
        rows = StepRows(self.hidden[padded], self.attended[padded], count)
        if self.adapted is not None:
            rows.adapted = self.adapted.only(wanted.numpy())
        return rows


class RowBlock:
    """Part of the rows, from `start` on, and where in memory it lies."""

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
