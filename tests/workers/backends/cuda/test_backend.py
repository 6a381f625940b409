"""Setup by a CUDA backend before anything runs on its device, with a recorded `torch.cuda`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vsched.errors import ConfigError
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends import choice
from vsched_workers.backends.choice import choose_backend
from vsched_workers.backends.cuda.attention import KernelMissing, TritonDecode
from vsched_workers.backends.cuda.device import CudaMemory
from vsched_workers.backends.cuda.fused_layers import load_kernels

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


@pytest.mark.parametrize("ranks", [1, 2])
def test_backend_makes_its_device_the_current_one_first(calls: Calls, ranks: int) -> None:
    """For both stages: pinned memory of an encode rank is on that device, too."""
    settings = WorkerSettings(device="cuda:1", ranks=ranks, rendezvous="somewhere")
    choose_backend(settings, torch.bfloat16)
    assert calls == [("device", "cuda:1"), ("memory", "cuda:1")]


def test_backend_leaves_the_current_device_if_none_is_named(calls: Calls) -> None:
    choose_backend(WorkerSettings(device="cuda"), torch.bfloat16)
    assert calls == [("memory", "cuda")]


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
    assert load_kernels() is None
    monkeypatch.setenv("VSCHED_CUDA_OFF", "graph")
    with pytest.raises(ConfigError, match=r"VSCHED_CUDA_OFF: unknown part 'graph'.*Known: graphs"):
        choose_backend(WorkerSettings(device="cuda:0"), torch.bfloat16)
