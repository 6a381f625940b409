"""Copies of rows, swapping on a separate stream, and the memory contract, with a fake `torch.cuda`."""

from __future__ import annotations

import functools
import types
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.batching.test_kv_cache import NOTHING, blocks_of, make_cache, pairs, same
from vsched.errors import DeviceOutOfMemory
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.cuda.device import BUFFERS, CudaMemory, CudaSwapArea, RowCopies
from vsched_workers.backends.reference.backend import Backend
from vsched_workers.batching.kv_cache import SwapArea

Log = list[tuple[str, object]]


class NotedCuda:
    """Streams and events that only record calls."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._events = 0
        self.current = self.Stream()

    def Stream(self, **_: object) -> Any:  # noqa: N802  # torch's name
        log = self._log

        class Stream:
            def wait_event(self, event: object) -> None:
                log.append(("stream waits", event))

        return Stream()

    def Event(self) -> Any:  # noqa: N802
        log, name = self._log, self._events
        self._events += 1

        class Event:
            def record(self, stream: object) -> None:
                log.append(("recorded", name))

            def synchronize(self) -> None:
                log.append(("host waits", name))

            def __eq__(self, other: object) -> bool:
                return name == other

            __hash__ = None  # type: ignore[assignment]

        return Event()

    def stream(self, stream: object) -> Any:
        return nullcontext(stream)

    def current_stream(self, _: object) -> Any:
        return self.current


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> tuple[RowCopies, Log]:
    log: Log = []
    kept = lambda _rows, stream: log.append(("kept for", stream))  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", kept)

    def allocate(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    return RowCopies("cpu", cuda=NotedCuda(log), allocate=allocate), log


def source(rows: int = 40) -> Any:
    return np.random.default_rng(0).integers(0, 255, (rows, 12), dtype=np.uint8)


def test_fetch_brings_just_the_rows_that_are_wanted(noted: tuple[RowCopies, Log]) -> None:
    """Also if a later fetch is larger, smaller, or uses the same buffer."""
    copies, _ = noted
    rows = source()
    host = Backend(WorkerSettings(), torch.float32)
    for wanted in ([3], [39, 0, 7, 7], [1, 2], [5], list(range(40))):
        index = np.array(wanted, dtype=np.int64)
        for found in (copies.fetch(rows, index), host.fetch_rows(rows, index)):
            assert np.array_equal(found.numpy(), rows[index])


def test_fetch_has_the_computing_stream_wait_and_the_host_not(
    noted: tuple[RowCopies, Log],
) -> None:
    copies, log = noted
    copies.fetch(source(), np.arange(4))
    assert [what for what, _ in log] == ["recorded", "stream waits", "kept for"]
    assert log[1] == ("stream waits", 0)


def test_fetch_reuses_no_buffer_before_its_copy_is_done(noted: tuple[RowCopies, Log]) -> None:
    copies, log = noted
    for turn in range(2 * BUFFERS):
        log.clear()
        copies.fetch(source(), np.arange(4))
        waits = [event for what, event in log if what == "host waits"]
        assert waits == ([] if turn < BUFFERS else [turn - BUFFERS])
        assert turn < BUFFERS or log[0] == ("host waits", turn - BUFFERS)


def pinned(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def test_swap_waits_for_the_steps_before_and_the_steps_after_for_it() -> None:
    """Copies see all earlier writes, and no later step overwrites a block that is still read; no host wait."""
    log: Log = []
    area = CudaSwapArea(make_cache(), 4, device="cpu", cuda=NotedCuda(log), allocate=pinned)
    area.copy(pairs((3, 0)), NOTHING)
    assert log == [("recorded", 0), ("stream waits", 0), ("recorded", 1), ("stream waits", 1)]


def test_swap_copies_what_the_host_would() -> None:
    """Out before back, over every layer."""
    ours, theirs = make_cache(), make_cache()
    area = CudaSwapArea(ours, 4, device="cpu", cuda=NotedCuda([]), allocate=pinned)
    host = SwapArea(theirs, 4)
    rng = np.random.default_rng(0)
    for _ in range(20):
        blocks, places = rng.permutation(9), rng.permutation(4)
        out = pairs(*zip(blocks[:3].tolist(), places[:3].tolist(), strict=True))
        back = pairs(*zip(places[1:3].tolist(), blocks[4:6].tolist(), strict=True))
        area.copy(out, back)
        host.copy(out, back)
        assert all(same(blocks_of(ours, one), blocks_of(theirs, one)) for one in range(9))


class FakeCuda:
    """A fake `torch.cuda`."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def mem_get_info(self, _device: object) -> tuple[int, int]:
        return 600, 1000

    def memory_reserved(self, _device: object) -> int:
        return 300

    def memory_allocated(self, _device: object) -> int:
        return 200

    def max_memory_reserved(self, _device: object) -> int:
        return 350

    def reset_peak_memory_stats(self, _device: object) -> None:
        self.calls.append("reset")

    def synchronize(self, _device: object) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty")

    def get_device_properties(self, _device: object) -> object:
        return types.SimpleNamespace(uuid="1234-5678")


def test_cuda_memory_asks_allocator_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's cache is reserved, not available; the rest belongs to other processes. Not on a GPU."""
    cuda = FakeCuda()
    for name in dir(cuda):
        if not name.startswith("_") and name != "calls":
            monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    clear = functools.partial(cuda.calls.append, "workspaces")
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    memory = CudaMemory("cuda:0")
    assert memory.pool == "cuda:GPU-1234-5678"
    assert (memory.total(), memory.available(), memory.reserved()) == (1000, 600, 300)
    assert (memory.allocated(), memory.peak()) == (200, 350)
    memory.reset_peak()
    memory.release()
    assert cuda.calls == ["reset", "synchronize", "workspaces", "empty"]


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
