"""Lookup table of the rotary angles of decode rows: computing one row takes a dozen torch calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vsched_workers.backends.cpu.kernels.rope import Bf16Array
from vsched_workers.backends.reference.rotary_angles import Angles

if TYPE_CHECKING:
    from vsched_workers.families.decoder import AttentionKind

TABLE_POSITIONS = 4096
"""Positions of a table: 1 MiB for a head dimension of 128. For later positions attention takes far longer than
angles.
"""

_ONE = np.uint16(0x3F80)
"""1.0 in bfloat16."""


class StepAngles:
    """Cosines and sines of decode rows, for each kind of layers.

    With multi-axis rotary embedding, the position of a decode row is the same on all axes, and differs from its index
    in the text.
    """

    def __init__(
        self, kinds: Sequence[AttentionKind], angles: Mapping[str, Angles], *, axes: bool
    ) -> None:
        """Take the kinds of layers, and the angles by frequencies."""
        self._kinds, self._angles, self._axis = kinds, angles, int(axes)
        fixed = all(each.fixed for each in angles.values())
        self._length = TABLE_POSITIONS if fixed else 0
        if fixed:
            every = torch.arange(self._length).expand(4, 1, -1)
            self._cos, self._sin = self._compute(every)

    def __call__(self, positions: torch.Tensor) -> tuple[Bf16Array, Bf16Array]:
        """Return cosines and sines [kinds, rows, head_dim / 2] of positions [4, 1, rows]."""
        places = positions.numpy()[self._axis, 0]
        if max(places.tolist()) >= self._length:
            return self._compute(positions)
        return self._cos.take(places, axis=1), self._sin.take(places, axis=1)

    def _compute(self, positions: torch.Tensor) -> tuple[Bf16Array, Bf16Array]:
        found = {name: arrays_of(made, positions) for name, made in self._angles.items()}
        turned = [
            found[kind.frequencies] if kind.rotates else unrotated(found[kind.frequencies])
            for kind in self._kinds
        ]
        return np.stack([cos for cos, _ in turned]), np.stack([sin for _, sin in turned])


def arrays_of(angles: Angles, positions: torch.Tensor) -> tuple[Bf16Array, Bf16Array]:
    """Return cosines and sines of positions as arrays."""
    cos, sin = angles(positions)
    return cos.view(torch.uint16).numpy(), sin.view(torch.uint16).numpy()


def unrotated(angles: tuple[Bf16Array, Bf16Array]) -> tuple[Bf16Array, Bf16Array]:
    """Return zero angles of the same shape."""
    cos, sin = angles
    return np.full_like(cos, _ONE), np.zeros_like(sin)
