"""The angles of rotary position embedding."""

from __future__ import annotations

from typing import Any

import torch

from vsched_workers.backends.cpu.kernels.rope import Bf16Array


class Angles:
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
        """Return cosines and sines [rows, head dim / 2] for positions [4, 1, rows], the first of which count text."""
        if self._plain:
            scaling = self._rotary.attention_scaling
            angles = positions[1:, 0].t().float().index_select(1, self._axes)
            angles *= self._rotary.inv_freq
            pair = (angles.cos() * scaling).bfloat16(), (angles.sin() * scaling).bfloat16()
        else:
            cos, sin = self._rotary(positions.new_empty(0, dtype=torch.bfloat16), positions[1:])
            pair = cos[0, :, : self._half].contiguous(), sin[0, :, : self._half].contiguous()
        first, second = (each.view(torch.uint16).numpy() for each in pair)
        return first, second
