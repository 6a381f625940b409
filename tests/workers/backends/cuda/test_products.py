"""Sizes of products of one row on a GPU (results are in test_fused_layers.py), and launches without Triton."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from vsched_workers.backends.cuda.products import (
    FastKernel,
    RowProduct,
    RowTiles,
    row_tiles,
    with_row_kernel,
)


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


STREAM = 77


class Jit:
    """A stand-in for a kernel of Triton: compiles at every launch through it."""

    arg_names = ("source", "target", "count", "scale", "WIDTH", "KIND")

    def __init__(self) -> None:
        self.compilations = 0
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        def launch(*_arguments: object, **_constants: object) -> object:
            self.compilations += 1
            number = self.compilations
            return SimpleNamespace(
                run=lambda *given: self.launches.append((number, *given)),
                function="function",
                packed_metadata="metadata",
            )

        return launch


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: STREAM, raising=False)


@pytest.mark.parametrize(
    "other",
    [
        {"source": torch.zeros(64, dtype=torch.float64)},
        {"source": torch.zeros(64)[1:]},
        {"count": 1},
        {"count": 33},
        {"count": 2**31},
        {"WIDTH": 16},
    ],
    ids=["type", "alignment", "one", "no multiple of 16", "64 bits", "constant"],
)
def test_arguments_with_another_specialization_are_compiled(other: dict[str, Any]) -> None:
    """Otherwise a kernel that relies on aligned addresses would read others."""
    jit = Jit()
    kernel = FastKernel(jit)
    usual: dict[str, Any] = {"source": torch.zeros(64), "count": 32, "WIDTH": 8}
    for given in (usual, usual | other, usual, usual | other):
        kernel[(1,)](
            given["source"], torch.zeros(64), given["count"], 0.5, WIDTH=given["WIDTH"], KIND="a"
        )
    assert jit.compilations == 2
    assert [number for number, *_ in jit.launches] == [1, 2]
