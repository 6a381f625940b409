"""Choice of a device and a backend: what is missing or not supported is refused with the key to change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.each_case import each_case
from tests.workers.driver import Checkpoints, inspect, load_encoder, load_generator
from vsched.errors import ConfigError
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.choice import check_device, choose_backend, threads_here
from vsched_workers.backends.cpu import threads
from vsched_workers.backends.cpu.kernels import simd
from vsched_workers.backends.reference.attention import decode_by_gather, prefill_by_gather

LOADS = {"encode": load_encoder, "generate": load_generator}
DETERMINISTIC = ("model.deterministic:", {"deterministic": True})
WEIGHTS = ("weights: int8 is", {"weights": "int8"})
ROWS = ("activations: int8 is", {"activations": "int8"})


@each_case(
    ("key", "dtype", "more"),
    [
        (DETERMINISTIC, torch.float32, {}),
        (DETERMINISTIC, torch.float16, {}),
        (DETERMINISTIC, torch.bfloat16, {"device": "cuda"}),
        (DETERMINISTIC, torch.bfloat16, {"attention": "exact"}),
        (WEIGHTS, torch.float16, {}),
        (WEIGHTS, torch.bfloat16, {"attention": "exact"}),
        (ROWS, torch.float16, {}),
        (ROWS, torch.bfloat16, {"attention": "exact"}),
        (ROWS, torch.bfloat16, {"device": "cuda:0"}),
    ],
)
def test_settings_without_a_kernel_are_refused(
    key: tuple[str, dict[str, Any]], dtype: torch.dtype, more: dict[str, Any]
) -> None:
    name, given = key
    with pytest.raises(ConfigError, match=f"{name} not possible on .* Remedy: "):
        choose_backend(WorkerSettings(**given | more), dtype)


def test_int8_kv_is_refused_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype: .*'int8' runs on cpu only, not on cuda. Rem"):
        choose_backend(WorkerSettings(device="cuda"), torch.bfloat16, "int8")


def test_deterministic_is_refused_on_a_processor_without_its_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simd, "has_bf16_dot", lambda: False)
    with pytest.raises(ConfigError, match="avx512_bf16"):
        choose_backend(WorkerSettings(deterministic=True), torch.bfloat16)


def test_attention_is_that_of_torch_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    absent: Any = None
    monkeypatch.setitem(sys.modules, "vsched_workers.backends.cpu.backend", absent)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        kernels = choose_backend(WorkerSettings(), dtype).choose_attention(absent, 1)
        assert (kernels.decode, kernels.prefill) == (decode_by_gather, prefill_by_gather)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str | None], None]:
    """Simulate a number of GPUs, and torch's CUDA version."""

    def give(count: int, cuda: str | None) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", None)

    return give


@each_case(
    ("device", "count", "cuda", "message"),
    [
        (
            "cuda:0",
            0,
            None,
            r"this build of torch \(.*\) cannot use a GPU: value cuda:0, limit cpu.",
        ),
        ("cuda", 0, "13.0", "torch finds no GPU: value cuda, limit cpu. Remedy: .*nvidia-smi"),
        ("cuda:2", 2, "13.0", "no such GPU.*: value cuda:2, limit cuda:1. Remedy: lower"),
        ("gpu", 2, "13.0", "not a device: value gpu, limit cpu, cuda or cuda:N. Remedy: "),
        ("cpu:0", 2, "13.0", "not a device: value cpu:0, "),
    ],
)
def test_device_that_is_not_there_is_refused_with_a_remedy(
    gpus: Callable[[int, str | None], None], device: str, count: int, cuda: str | None, message: str
) -> None:
    gpus(count, cuda)
    with pytest.raises(ConfigError, match=f"encode.device: {message}"):
        check_device(device, key="encode.device")
    gpus(2, "13.0")
    for there in ("cpu", "cuda", "cuda:1"):
        check_device(there, key="encode.device")


@pytest.mark.parametrize("stage", ["encode", "generate"])
def test_load_looks_at_the_device_first(
    gpus: Callable[[int, str | None], None], checkpoints: Checkpoints, stage: str
) -> None:
    gpus(0, None)
    with pytest.raises(ConfigError, match=f"{stage}.device: this build of torch"):
        LOADS[stage](inspect(checkpoints("nano25")), device="cuda:0")


@pytest.mark.parametrize("stage", ["encode", "generate"])
@pytest.mark.parametrize("attention", ["auto", "exact"])
def test_workers_report_the_threads_of_their_process(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, stage: str, attention: str
) -> None:
    """With kernels, the threads in use of the pool, which may be fewer; otherwise torch's, which are constant."""
    monkeypatch.setattr(threads, "_POOL", [])
    worker = LOADS[stage](inspect(checkpoints("nano25")), attention=attention, threads=2)
    assert worker.threads_here() == 2
    threads.process_pool().use(1)
    assert worker.threads_here() == (1 if attention == "auto" else 2)


def test_workers_on_a_gpu_report_no_threads() -> None:
    backend = SimpleNamespace(device="cuda:1", settings=WorkerSettings(threads=2), compiles=True)
    assert threads_here(backend) == 0  # type: ignore[arg-type]
