"""Muon: a step of a matrix is its momentum with every singular value brought near one (Jordan et al., 2024).

All of a layer's directions learn at the same rate, not just the few that are seen most: here half as many steps lead
as far as AdamW's. `torch.optim.Muon` is the same, matrix after matrix; those of a small model are of a few shapes, and
stacked by shape they take half of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_SERIES = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5


class Muon(torch.optim.Optimizer):
    """Learns matrices, [out, in].

    Args:
        lr: As AdamW's: a step is scaled to be as large as one of AdamW's.
        momentum: How much of the momentum a step keeps.
        weight_decay: As AdamW's.
        fused: How many matrices of the same shape are merged into one parameter, one upon the other; 1 where unnamed.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        fused: dict[torch.nn.Parameter, int] | None = None,
    ) -> None:
        self._fused = fused or {}
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            self._step(group)

    def _step(self, group: dict[str, Any]) -> None:
        alike: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for value in group["params"]:
            if value.grad is None:
                continue
            state = self.state[value]
            if not state:
                state["momentum"] = torch.zeros_like(value)
            state["momentum"].lerp_(value.grad, 1 - group["momentum"])
            ahead = value.grad.lerp(state["momentum"], group["momentum"])
            value.mul_(1 - group["lr"] * group["weight_decay"])
            parts = self._fused.get(value, 1)
            for matrix, change in zip(value.chunk(parts), ahead.chunk(parts), strict=True):
                if matrix.shape[0] > matrix.shape[1]:
                    matrix, change = matrix.mT, change.mT
                alike.setdefault(tuple(matrix.shape), []).append((matrix, change))
        for (_, longer), pairs in alike.items():
            # AdamW moves an element by 0.2 of its rate or so.
            size = 0.2 * longer**0.5 * group["lr"]
            changes = orthogonalised(torch.stack([change for _, change in pairs]))
            for (matrix, _), change in zip(pairs, changes, strict=True):
                matrix.sub_(change, alpha=size)


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices, [count, rows, columns] with rows <= columns, with singular values of 0.7 to 1.2."""
    first, second, third = _SERIES
    x: torch.Tensor = matrices / (torch.linalg.matrix_norm(matrices, keepdim=True) + 1e-7)
    for _ in range(_ROUNDS):
        square = x @ x.mT
        series = torch.baddbmm(square, square, square, beta=second, alpha=third)
        x = torch.baddbmm(x, series, x, beta=first)
    return x
