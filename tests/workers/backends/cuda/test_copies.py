"""Copies of rows, with a fake `torch.cuda` that records waits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.cuda.device import BUFFERS, RowCopies
from vsched_workers.backends.reference.backend import Backend

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
