"""Rotary embedding angles, for backends that apply the rotation themselves."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Angles(Protocol):
    """Computes angles from positions."""

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [rows, head dim / 2] of positions [4, 1, rows]: the text's and three of mrope."""
        ...


def angles_of(rotary: Any, kind: str, *, axes: bool, dtype: torch.dtype) -> Angles:
    """Return the angles of a model's rotary embedding, for a kind of layer if kinds have separate frequencies.

    `axes` is whether the model uses mrope; cosines and sines have type `dtype`.
    """
    return AxesAngles(rotary, dtype) if axes else TextAngles(rotary, kind, dtype)


class TextAngles:
    """Rotary embedding angles for text positions.

    The frequencies and the factor are those that transformers initializes, of any type (linear, yarn, llama3). Some
    types change them beyond an original length; the context is then limited to that length.
    """

    def __init__(self, rotary: Any, kind: str, dtype: torch.dtype) -> None:
        prefix = f"{kind}_" if kind else ""
        self._frequencies: torch.Tensor = getattr(rotary, f"{prefix}inv_freq")
        self._scaling: float = getattr(rotary, f"{prefix}attention_scaling")
        self._dtype = dtype

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines; see `Angles`."""
        angles = positions[0, 0, :, None].float() * self._frequencies
        return _pair(angles, self._scaling, self._dtype)


class AxesAngles:
    """Rotary embedding angles for mrope: positions on three axes."""

    def __init__(self, rotary: Any, dtype: torch.dtype) -> None:
        self._rotary = rotary
        self._dtype = dtype
        self._half: int = len(rotary.inv_freq)
        device = rotary.inv_freq.device
        one = torch.eye(3, dtype=torch.int64, device=device)[:, None]
        _, sin = rotary(torch.empty(0, dtype=torch.float32, device=device), one)
        # A frequency belongs to the axis that alone changes its angle.
        changed = sin[0, :, : self._half].ne(0)
        self._axes = changed.int().argmax(0)
        self._fixed = rotary.rope_type == "default" and bool((changed.sum(0) == 1).all())

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines; see `Angles`."""
        if self._fixed:
            angles = positions[1:, 0].t().float().index_select(1, self._axes)
            angles *= self._rotary.inv_freq
            return _pair(angles, self._rotary.attention_scaling, self._dtype)
        cos, sin = self._rotary(positions.new_empty(0, dtype=self._dtype), positions[1:])
        return cos[0, :, : self._half].contiguous(), sin[0, :, : self._half].contiguous()


def _pair(
    angles: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)
