"""Matrix products of a linear layer on a GPU: of one row by an own kernel, of more rows by torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

TILE_MIN, TILE_MAX = 32, 512
"""Values of a weight's row that a program reads at a time."""

PROGRAM_VALUES = 4096
"""Values of a weight that a program reads at a time."""

PROGRAMS_MIN = 256
"""Programs that keep a large GPU busy; with fewer, each takes fewer rows of the weight."""


class RowTiles(NamedTuple):
    """A program's share of a weight: rows, values of a row at a time, and tiles that are loaded in parallel."""

    outputs: int
    tile: int
    stages: int


def row_tiles(outputs: int, inputs: int, *, parts: int = 1) -> RowTiles | None:
    """Return the tiles for a product of one row; None if they do not divide the weight.

    `parts` weights are read at a time, as gate and up.
    """
    tile = min(inputs & -inputs, TILE_MAX)
    fitting = [
        each for each in (16, 8, 4) if each * tile * parts <= PROGRAM_VALUES and outputs % each == 0
    ]
    if tile < TILE_MIN or not fitting:
        return None
    busy = [each for each in fitting if outputs // each >= PROGRAMS_MIN]
    return RowTiles((busy or fitting[-1:])[0], tile, 3 if tile == TILE_MAX else 4)


class RowProduct:
    """The product by the weight of a linear layer [out, in]; it takes one row faster than torch."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kernel: Any) -> None:
        """Take `multiply_row` or a stand-in for it."""
        self.weight, self._bias, self._kernel = weight, bias, kernel
        self._turned = weight.t()
        outputs, inputs = weight.shape
        self._tiles = row_tiles(outputs, inputs) if weight.is_contiguous() else None
        self._gated = row_tiles(outputs // 2, inputs, parts=2) if weight.is_contiguous() else None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply activations [rows, in]; return [rows, out]."""
        if len(rows) != 1 or self._tiles is None:
            if self._bias is None:  # with less host time than functional.linear
                return torch.mm(rows, self._turned)
            return torch.addmm(self._bias, rows, self._turned)
        return self._run(rows, self._tiles, len(self.weight), None)

    def gated(self, rows: torch.Tensor, activation: str) -> torch.Tensor | None:
        """Multiply one row by a merged gate and up weight; return the gated values [1, out / 2].

        None if the rows must be multiplied and gated separately.
        """
        if len(rows) != 1 or self._gated is None or self._bias is not None:
            return None
        return self._run(rows, self._gated, len(self.weight) // 2, activation)

    def _run(
        self, rows: torch.Tensor, tiles: RowTiles, outputs: int, activation: str | None
    ) -> torch.Tensor:
        out = rows.new_empty(1, outputs)
        self._kernel[(outputs // tiles.outputs,)](
            rows,
            self.weight,
            self.weight if self._bias is None else self._bias,
            out,
            outputs,
            rows.shape[1],
            HAS_BIAS=self._bias is not None,
            ACTIVATION=activation,
            OUTPUTS=tiles.outputs,
            TILE=tiles.tile,
            STAGES=tiles.stages,
        )
        return out


def with_row_kernel(product: Any, kernel: Any) -> Any:
    """Return the product of a plain linear layer with the kernel for one row; any other product as it is."""
    if type(product) is not nn.Linear or product._forward_hooks:  # noqa: SLF001
        return product
    return RowProduct(product.weight, product.bias, kernel)
