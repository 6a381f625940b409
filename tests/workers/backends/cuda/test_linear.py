"""Sizes of products of one row; results are in test_fused_layers.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.bench.gpu.costs import SHAPES
from vsched_workers.backends.cuda.products import (
    PROGRAMS_MIN,
    RowProduct,
    RowTiles,
    row_tiles,
    with_row_kernel,
)


def weights_of(name: str) -> list[tuple[int, int]]:
    """Return the sizes of a shape's weights."""
    shape = SHAPES[name]
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    hidden, inner = shape.hidden, shape.inner
    return [(qkv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]


@pytest.mark.parametrize("name", ["3b", "7b"])
def test_one_row_keeps_a_large_gpu_busy_with_every_product(name: str) -> None:
    for outputs, inputs in weights_of(name):
        tiles = row_tiles(outputs, inputs)
        assert tiles is not None
        assert outputs // tiles.outputs >= PROGRAMS_MIN
        assert outputs % tiles.outputs == inputs % tiles.tile == 0


def test_sizes_that_tiles_do_not_divide_are_left_to_torch() -> None:
    assert row_tiles(2048, 2048) == RowTiles(outputs=8, tile=512, stages=3)
    assert row_tiles(64, 48) is None
    assert row_tiles(63, 64) is None
    product = RowProduct(torch.randn(63, 48), None, None)
    for rows in (torch.randn(1, 48), torch.randn(2, 48)):
        assert torch.equal(product(rows), functional.linear(rows, product.weight))
    assert product.gated(torch.randn(1, 48), "SILU") is None


def test_layers_with_hooks_stay_as_they_are() -> None:
    """Hooks sum the outputs over ranks."""
    layer = nn.Linear(64, 64)
    assert isinstance(with_row_kernel(layer, None), RowProduct)
    layer.register_forward_hook(lambda *_: None)
    assert with_row_kernel(layer, None) is layer
