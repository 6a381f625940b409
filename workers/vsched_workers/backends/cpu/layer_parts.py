"""Parts of fused layers: norms, and the rows of a step in blocks whose intermediate results share memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vsched_workers.adapters.places import PassRows
from vsched_workers.backends.cpu.kernels.norm import add_norm, add_normed, norm_of
from vsched_workers.backends.reference.packed_weights import block_starts
from vsched_workers.families.decoders import NormWeights
from vsched_workers.memory.sparse_runs import pieces, room_for

_NO_NORM = norm_of(0, 0.0, once=False)


@dataclass(slots=True)
class Norm:
    """An RMS norm or LayerNorm, or none.

    Attributes:
        weight_at: Address of its weights, which the module owns, bfloat16; 0 without a norm.
        width: Number of weights.
        eps: Added to the mean of squares.
        record: Record for kernels that support all kinds of norms.
        weights: Weights at the address in the record, kept alive.
    """

    weight_at: int
    width: int
    eps: np.float32
    record: npt.NDArray[Any]
    weights: torch.Tensor | None

    @classmethod
    def of(
        cls, module: Any, kind: NormWeights = NormWeights.AFTER_ROUNDING, *, width: int = 0
    ) -> Norm:
        """Take the weights of transformers' module; `width` is the width of rows if the module is None."""
        if module is None:
            return cls(0, width, np.float32(0.0), _NO_NORM, None)
        weights: torch.Tensor = module.weight
        assert weights.is_contiguous(), "weights must be contiguous"
        address = weights.data_ptr()
        if kind is not NormWeights.AFTER_ROUNDING:
            weights = weights.float() + float(kind is NormWeights.PLUS_ONE)
        eps: float = module.eps if hasattr(module, "eps") else module.variance_epsilon
        once, bias = kind is not NormWeights.AFTER_ROUNDING, getattr(module, "bias", None)
        bias_at = 0 if bias is None else bias.data_ptr()
        record = norm_of(weights.data_ptr(), eps, once=once, bias_at=bias_at)
        return cls(address, len(weights), np.float32(eps), record, weights)

    def add(
        self, pool: int, hidden_at: int, delta: torch.Tensor | None, rows: int, out_at: int
    ) -> None:
        """Add `delta` to hidden states in place, and write the norms of the sums; this norm rounds twice."""
        delta_at = 0 if delta is None else delta.data_ptr()
        if self.record[0]["bias_at"]:
            given = hidden_at, delta_at, _NO_NORM, np.float32(1.0), self.record, self.width
            add_normed(pool, *given, out_at, rows)
            return
        add_norm(pool, hidden_at, delta_at, self.weight_at, self.width, self.eps, out_at, rows)

    @property
    def once(self) -> bool:
        """Whether the weights of the record are float32, and only the result is rounded."""
        return bool(self.record[0]["once"])

    @property
    def record_at(self) -> int:
        """Address of the weights in the record; 0 without a norm."""
        return int(self.record[0]["weight_at"])


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
