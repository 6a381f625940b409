"""Norms of a language model, as its fused layers use them: addresses, widths and types of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vsched_workers.backends.cpu.kernels.norm import norm_of
from vsched_workers.families.decoder import NormWeights


@dataclass(slots=True)
class Norm:
    """An RMS norm, or none.

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
            return cls(0, width, np.float32(0.0), norm_of(0, 0.0, once=False), None)
        weights: torch.Tensor = module.weight
        assert weights.is_contiguous(), "weights must be contiguous"
        address = weights.data_ptr()
        if kind is not NormWeights.AFTER_ROUNDING:
            weights = weights.float() + float(kind is NormWeights.PLUS_ONE)
        eps: float = module.eps if hasattr(module, "eps") else module.variance_epsilon
        record = norm_of(weights.data_ptr(), eps, once=kind is not NormWeights.AFTER_ROUNDING)
        return cls(address, len(weights), np.float32(eps), record, weights)

    @property
    def once(self) -> bool:
        """Whether the weights of the record are float32, and only the result is rounded."""
        return bool(self.record[0]["once"])

    @property
    def record_at(self) -> int:
        """Address of the weights in the record; 0 without a norm."""
        return int(self.record[0]["weight_at"])
