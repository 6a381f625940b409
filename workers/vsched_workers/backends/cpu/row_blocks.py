"""Rows of a step in the layers of a language model, split into blocks that are multiplied at once."""

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
    """Rows multiplied at once: the maximum, and the maximum that all products take without padding."""

    rows: int
    custom: int

    @classmethod
    def of(cls, module: nn.Module) -> BlockSizes:
        """Return the best sizes for the linear layers below a module."""
        packed = [each.packed for each in module.modules() if isinstance(each, PackedLinear)]
        return cls(
            min((weight.block_rows for weight in packed), default=FEW_ROWS[-1]),
            min((weight.custom_rows_max for weight in packed), default=0),
        )

    def parts(self, count: int) -> Iterator[slice]:
        """Split `count` rows into blocks."""
        starts = block_starts(count, self.rows, self.custom)
        for start in pieces(starts):
            yield slice(start, start + starts.step)


class StepRows:
    """Rows of a step, split into blocks that are multiplied at once.

    Shape: hidden, normed [rows, hidden], attended [rows, heads * head_dim]. Rows after the first `count` are padding.

    Attributes:
        adapted: Rows with adapters; None if there are none.
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
        # Decode rows come first, so blocks skipped by a sparse run take no longer than computed
        # ones.
        self.blocks = [
            RowBlock(part.start, *(whole[part] for whole in (hidden, self.normed, attended)))
            for part in sizes.parts(len(hidden))
        ]

    def only(self, wanted: torch.Tensor) -> StepRows:
        """Select some of the rows, and add padding; their norms are lost."""
        count, custom = len(wanted), self._sizes.custom
        padded = functional.pad(wanted, (0, padded_rows(count, custom=custom) - count))
        rows = StepRows(self.hidden[padded], self.attended[padded], count, self._sizes)
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
