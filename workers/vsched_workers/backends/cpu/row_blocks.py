"""The rows of a step while they pass the layers of a language model, cut into blocks that are multiplied at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from vsched_workers.adapters.rows import PassRows
from vsched_workers.backends.reference.packed_weights import (
    FEW_ROWS,
    PackedLinear,
    block_starts,
    padded_rows,
)
from vsched_workers.memory.sparse_runs import pieces, room_for


class BlockSizes(NamedTuple):
    """How many rows are multiplied at once: most of them, and most that all products take as they are."""

    rows: int
    custom: int

    @classmethod
    def of(cls, module: nn.Module) -> BlockSizes:
        """Return what is best for the linear layers below a module."""
        packed = [each.packed for each in module.modules() if isinstance(each, PackedLinear)]
        return cls(
            min((weight.block_rows for weight in packed), default=FEW_ROWS[-1]),
            min((weight.custom_rows_max for weight in packed), default=0),
        )

    def parts(self, count: int) -> Iterator[slice]:
        """Cut so many rows into those that are multiplied at once."""
        starts = block_starts(count, self.rows, self.custom)
        for start in pieces(starts):
            yield slice(start, start + starts.step)


class StepRows:
    """The rows of a step while they pass the layers, cut into blocks that are multiplied at once.

    Shape: hidden, normed [rows, hidden], attended [rows, heads * head dim]. Rows behind the first `count` are padding.

    Attributes:
        adapted: Which of the rows have adapters; None where none has.
    """

    adapted: PassRows | None = None

    def __init__(
        self, hidden: torch.Tensor, attended: torch.Tensor, count: int, sizes: BlockSizes
    ) -> None:
        self.hidden = hidden
        self.attended = attended
        self.normed = room_for(hidden, *hidden.shape)
        self.count = count
        attended[count:] = 0
        self._sizes = sizes
        # Decode rows come first, so that of parts that are left out none takes more than those that are taken.
        self.blocks = [
            RowBlock(part.start, *(whole[part] for whole in (hidden, self.normed, attended)))
            for part in sizes.parts(len(hidden))
        ]

    def only(self, wanted: torch.Tensor) -> StepRows:
        """Return some of the rows, and padding; their norms are lost."""
        count, custom = len(wanted), self._sizes.custom
        padded = functional.pad(wanted, (0, padded_rows(count, custom=custom) - count))
        rows = StepRows(self.hidden[padded], self.attended[padded], count, self._sizes)
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
