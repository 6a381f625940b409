"""Setup by a CUDA backend, its memory, products of one row and launches, with a recorded or fake `torch.cuda`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from vsched.errors import ConfigError, DeviceOutOfMemory
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.choice import choose_backend
from vsched_workers.backends.cuda.attention import KernelMissing, TritonDecode
from vsched_workers.backends.cuda.attention_trials import load_kernels
from vsched_workers.backends.cuda.device import CudaMemory
from vsched_workers.backends.cuda.fused_layers import LayerKernels
from vsched_workers.backends.cuda.products import (
    FastKernel,
    QuantizedKernels,
    RowProduct,
    RowTiles,
    row_tiles,
    with_row_kernel,
)

Calls = list[tuple[str, object]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    noted: Calls = []

    def set_device(device: object) -> None:
        noted.append(("device", device))

    memory = CudaMemory.__init__

    def first_use(self: CudaMemory, name: str) -> None:
        noted.append(("memory", name))
        memory(self, name)

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(CudaMemory, "__init__", first_use)
    return noted


@pytest.mark.parametrize(
    ("device", "ranks", "noted"),
    [
        ("cuda:1", 1, [("device", "cuda:1"), ("memory", "cuda:1")]),
        ("cuda:1", 2, [("device", "cuda:1"), ("memory", "cuda:1")]),
        ("cuda", 1, [("memory", "cuda")]),
    ],
)
def test_backend_makes_a_named_device_the_current_one_first(
    calls: Calls, device: str, ranks: int, noted: Calls
) -> None:
    """For both stages: pinned memory of an encode rank is on that device, too."""
    settings = WorkerSettings(device=device, ranks=ranks, rendezvous="somewhere")
    choose_backend(settings, torch.bfloat16)
    assert calls == noted


@pytest.mark.usefixtures("calls")
def test_backend_has_float32_be_float32() -> None:
    """Matrix products and convolutions: TF32, which torch allows for the latter, has a 10-bit mantissa."""
    places: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    before = [place.allow_tf32 for place in places]
    try:
        for place in places:
            place.allow_tf32 = True
        choose_backend(WorkerSettings(device="cuda:0"), torch.float32)
        assert [place.allow_tf32 for place in places] == [False, False]
    finally:
        for place, allowed in zip(places, before, strict=True):
            place.allow_tf32 = allowed


@pytest.mark.usefixtures("calls")
def test_variable_turns_parts_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VSCHED_CUDA_OFF", "graphs, triton")
    backend = choose_backend(WorkerSettings(device="cuda:0"), torch.bfloat16)
    assert backend.spare_blocks == 0, "steps are not captured"
    with pytest.raises(KernelMissing, match="turned off"):
        TritonDecode(132)
    assert load_kernels(LayerKernels) is None
    assert load_kernels(QuantizedKernels) is None
    monkeypatch.setenv("VSCHED_CUDA_OFF", "graph")
    with pytest.raises(ConfigError, match=r"VSCHED_CUDA_OFF: unknown part 'graph'.*Known: graphs"):
        choose_backend(WorkerSettings(device="cuda:0"), torch.bfloat16)


def test_cuda_memory_asks_allocator_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's cache is reserved, not available; the rest belongs to other processes. Not on a GPU."""
    calls: list[str] = []
    answers = {
        "mem_get_info": (600, 1000),
        "memory_reserved": 300,
        "memory_allocated": 200,
        "max_memory_reserved": 350,
        "get_device_properties": SimpleNamespace(uuid="1234-5678"),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda _device, answer=answer: answer)
    for owner, name in (
        (torch.cuda, "reset_peak_memory_stats"),
        (torch.cuda, "synchronize"),
        (torch._C, "_cuda_clearCublasWorkspaces"),
        (torch.cuda, "empty_cache"),
    ):
        monkeypatch.setattr(owner, name, lambda *_, name=name: calls.append(name), raising=False)
    memory = CudaMemory("cuda:0")
    assert memory.pool == "cuda:GPU-1234-5678"
    assert (memory.total(), memory.available(), memory.reserved()) == (1000, 600, 300)
    assert (memory.allocated(), memory.peak()) == (200, 350)
    memory.reset_peak()
    memory.release()
    assert calls[:2] == ["reset_peak_memory_stats", "synchronize"]
    assert calls[2:] == ["_cuda_clearCublasWorkspaces", "empty_cache"]

    def full(size: int, **_: object) -> object:
        calls.append(str(size))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(DeviceOutOfMemory, match="holding memory back"), memory.hold(101):
        pass
    assert calls[-1] == "101"


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
def test_arguments_with_another_specialization_are_compiled(
    other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a kernel that relies on aligned addresses would read others."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 77, raising=False)
    jit = Jit()
    kernel = FastKernel(jit)
    usual: dict[str, Any] = {"source": torch.zeros(64), "count": 32, "WIDTH": 8}
    for given in (usual, usual | other, usual, usual | other):
        kernel[(1,)](
            given["source"], torch.zeros(64), given["count"], 0.5, WIDTH=given["WIDTH"], KIND="a"
        )
    assert jit.compilations == 2
    assert [number for number, *_ in jit.launches] == [1, 2]
