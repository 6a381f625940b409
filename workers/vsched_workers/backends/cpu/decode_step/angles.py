"""Rotary angles of the rows of a step, for each kind of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vsched_workers.backends.cpu.kernels.rope import Bf16Array
from vsched_workers.backends.reference.rotary_angles import Angles

if TYPE_CHECKING:
    from vsched_workers.families.decoder import AttentionKind

_ONE = np.uint16(0x3F80)
"""1.0 in bfloat16."""


class StepAngles:
    """Cosines and sines of rows; kinds of layers that do not rotate have zero angles."""

    def __init__(self, kinds: Sequence[AttentionKind], angles: Mapping[str, Angles]) -> None:
        """Take the kinds of layers, and the angles by frequencies."""
        self._kinds, self._angles = kinds, angles

    def __call__(self, positions: torch.Tensor) -> tuple[Bf16Array, Bf16Array]:
        """Return cosines and sines [kinds, rows, head_dim / 2] of positions [4, 1, rows]."""
        found = {}
        for name, made in self._angles.items():
            cos, sin = made(positions)
            found[name] = cos.view(torch.uint16).numpy(), sin.view(torch.uint16).numpy()
        turned = [found[kind.frequencies] for kind in self._kinds]
        still = [
            (cos, sin) if kind.rotates else (np.full_like(cos, _ONE), np.zeros_like(sin))
            for kind, (cos, sin) in zip(self._kinds, turned, strict=True)
        ]
        return np.stack([cos for cos, _ in still]), np.stack([sin for _, sin in still])
