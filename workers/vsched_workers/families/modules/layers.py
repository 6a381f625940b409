"""Modules that the language model and the vision tower share."""

from __future__ import annotations

import torch
from torch import nn


class QwenRmsNorm(nn.Module):
    """RMS norm; the normalized row is rounded before the product with the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the norm of rows [..., width]."""
        wide = rows.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(rows.dtype)


class QwenFeedForward(nn.Module):
    """A gated feed-forward."""

    def __init__(self, width: int, inner: int, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of the same width."""
        gated: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(rows)) * self.up_proj(rows))
        return gated


def frequencies(theta: float, values: int) -> torch.Tensor:
    """Return the rotary frequencies for `values` values, float32 [values / 2]."""
    # On the meta device, this would make torch import its compiler, which takes two seconds.
    with torch.device("cpu"):
        return 1.0 / (theta ** (torch.arange(0, values, 2, dtype=torch.float) / values))


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary embedding to heads, whose halves form the rotated pairs; all three broadcast together."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin
