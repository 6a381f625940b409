"""Setup by a CUDA backend before anything runs on its device, and its memory, with a recorded or fake `torch.cuda`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vsched.errors import ConfigError, DeviceOutOfMemory
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends import choice
from vsched_workers.backends.choice import choose_backend
from vsched_workers.backends.cuda.attention import KernelMissing, TritonDecode
from vsched_workers.backends.cuda.attention_trials import load_kernels
from vsched_workers.backends.cuda.device import CudaMemory
from vsched_workers.backends.cuda.fused_layers import LayerKernels

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
def test_weights_in_a_few_bits_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    given = WorkerSettings(device="cuda:0", weights="int8")
    monkeypatch.setattr(choice, "find_spec", lambda _: object())
    choose_backend(given, torch.bfloat16)
    monkeypatch.setattr(choice, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"on cuda:0 with bfloat16, .* without triton, .* Remedy"):
        choose_backend(given, torch.bfloat16)


@pytest.mark.usefixtures("calls")
def test_variable_turns_parts_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VSCHED_CUDA_OFF", "graphs, triton")
    backend = choose_backend(WorkerSettings(device="cuda:0"), torch.bfloat16)
    assert backend.spare_blocks == 0, "steps are not captured"
    with pytest.raises(KernelMissing, match="turned off"):
        TritonDecode(132)
    assert load_kernels(LayerKernels) is None
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


def test_cuda_memory_holds_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures on the device raise the common exception. Not on a GPU."""
    sizes: list[int] = []

    def empty(size: int, **_: object) -> object:
        sizes.append(size)
        if size > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return object()

    monkeypatch.setattr(torch, "empty", empty)
    memory = CudaMemory("cuda:0")
    with memory.hold(100):
        assert sizes == [100]
    with pytest.raises(DeviceOutOfMemory), memory.hold(101):
        pass
