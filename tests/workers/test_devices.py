"""Missing devices are refused with the key to change; workers report their CPU threads; copies to and from a device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tests.each_case import each_case
from tests.workers.driver import Checkpoints, inspect, load_encoder, load_generator
from vsched.errors import ConfigError
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.choice import check_device, threads_here
from vsched_workers.backends.cpu import threads


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


@each_case("device", ["cpu", "cuda", "cuda:1"])
def test_device_that_is_there_is_accepted(
    gpus: Callable[[int, str | None], None], device: str
) -> None:
    gpus(2, "13.0")
    check_device(device, key="encode.device")


@pytest.mark.parametrize("stage", ["encode", "generate"])
def test_load_looks_at_the_device_first(
    gpus: Callable[[int, str | None], None], checkpoints: Checkpoints, stage: str
) -> None:
    gpus(0, None)
    load = {"encode": load_encoder, "generate": load_generator}[stage]
    with pytest.raises(ConfigError, match=f"{stage}.device: this build of torch"):
        load(inspect(checkpoints("nano25")), WorkerSettings(device="cuda:0"))


@pytest.mark.parametrize("stage", ["encode", "generate"])
@pytest.mark.parametrize("attention", ["auto", "exact"])
def test_workers_report_the_threads_of_their_process(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, stage: str, attention: str
) -> None:
    """With kernels, the threads in use of the pool, which may be fewer; otherwise torch's, which are constant."""
    monkeypatch.setattr(threads, "_POOL", [])
    load = {"encode": load_encoder, "generate": load_generator}[stage]
    settings = WorkerSettings(attention=attention, threads=2)
    worker = load(inspect(checkpoints("nano25")), settings)
    assert worker.threads_here() == 2
    threads.process_pool().use(1)
    assert worker.threads_here() == (1 if attention == "auto" else 2)


def test_workers_on_a_gpu_report_no_threads() -> None:
    backend = SimpleNamespace(device="cuda:1", settings=WorkerSettings(threads=2), compiles=True)
    assert threads_here(backend) == 0  # type: ignore[arg-type]
