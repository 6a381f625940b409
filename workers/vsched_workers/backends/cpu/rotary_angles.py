"""The angles of rotary position embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vsched_workers.backends.cpu.kernels.rope import Bf16Array

Angles = Callable[[torch.Tensor], tuple[Bf16Array, Bf16Array]]
"""From positions [4, 1, rows], of the text and on three axes, to cosines and sines [rows, head dim / 2]."""

_ONE = np.uint16(0x3F80)


def angles_of(rotary: Any, kind: str, *, axes: bool) -> Angles:
    """Return the angles of a model's rotary embedding, for a kind of layer where they have frequencies of their own.

    `axes` is whether it takes positions on three axes.
    """
    return AxesAngles(rotary) if axes else TextAngles(rotary, kind)


class TextAngles:
    """The angles by which heads are rotated, for each row's position in the text.

    The frequencies and the factor are those that transformers initialises, whatever their kind (linear, yarn, llama3).
    Some kinds change them beyond an original length, and that length is then the longest context.
    """

    def __init__(self, rotary: Any, kind: str = "") -> None:
        prefix = f"{kind}_" if kind else ""
        self._frequencies: torch.Tensor = getattr(rotary, f"{prefix}inv_freq")
        self._scaling: float = getattr(rotary, f"{prefix}attention_scaling")

    def __call__(self, positions: torch.Tensor) -> tuple[Bf16Array, Bf16Array]:
        """Return cosines and sines; see `Angles`."""
        return _pair(positions[0, 0, :, None].float() * self._frequencies, self._scaling)


class AxesAngles:
    """The angles by which heads are rotated, for each row's positions on three axes."""

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        self._half: int = len(rotary.inv_freq)
        one = torch.eye(3, dtype=torch.int64)[:, None]
        _, sin = rotary(torch.empty(0, dtype=torch.float32), one)
        # A frequency belongs to the axis that alone changes its angle.
        changed = sin[0, :, : self._half].ne(0)
        self._axes = changed.int().argmax(0)
        self._plain = rotary.rope_type == "default" and bool((changed.sum(0) == 1).all())

    def __call__(self, positions: torch.Tensor) -> tuple[Bf16Array, Bf16Array]:
        """Return cosines and sines; see `Angles`."""
        if self._plain:
            angles = positions[1:, 0].t().float().index_select(1, self._axes)
            angles *= self._rotary.inv_freq
            return _pair(angles, self._rotary.attention_scaling)
        cos, sin = self._rotary(positions.new_empty(0, dtype=torch.bfloat16), positions[1:])
        return _array(cos[0, :, : self._half]), _array(sin[0, :, : self._half])


def unrotated(angles: tuple[Bf16Array, Bf16Array]) -> tuple[Bf16Array, Bf16Array]:
    """Return angles of zero for as many rows."""
    cos, sin = angles
    return np.full_like(cos, _ONE), np.zeros_like(sin)


def _pair(angles: torch.Tensor, scaling: float) -> tuple[Bf16Array, Bf16Array]:
    return _array((angles.cos() * scaling).bfloat16()), _array((angles.sin() * scaling).bfloat16())


def _array(values: torch.Tensor) -> Bf16Array:
    array: Bf16Array = values.contiguous().view(torch.uint16).numpy()
    return array
