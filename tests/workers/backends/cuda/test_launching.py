"""Launches without Triton's dispatch: of the right specialization, with all arguments in their order."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vsched_workers.backends.cuda.products import FastKernel

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


def test_later_launches_are_direct_with_constants_in_the_kernels_order() -> None:
    jit = Jit()
    kernel = FastKernel(jit)
    source, target = torch.zeros(64), torch.zeros(64)
    for count in (32, 48):
        kernel[(5, count)](source, target, count, 0.5, KIND="a", WIDTH=8, num_warps=4)
    hooks = (None, None, None)
    arguments = (source, target, 48, 0.5, 8, "a")
    assert jit.compilations == 1
    (launched,) = jit.launches
    assert launched[:10] == (1, 5, 48, 1, STREAM, "function", "metadata", *hooks)
    assert all(one is other for one, other in zip(launched[10:], arguments, strict=True))


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
