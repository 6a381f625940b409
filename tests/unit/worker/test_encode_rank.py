"""The encode side of a rank survives its worker."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from vsched.errors import DeviceOutOfMemory, RankDesync
from vsched.failures import EncodeErrorKind
from vsched.kernel.decisions import EncodeDecision, EncodeTask
from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.types import ArraySpec, Extent
from vsched.wire import EncodeResult, Paused
from vsched.worker.contract import EncodeJob, EncodeWorker
from vsched.worker.stage_rank import EncodeRank


class Encoder(EncodeWorker):
    """Keeps its jobs; writes the sum of the pixels, or raises."""

    weights_bytes = 0

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.batches: list[list[EncodeJob]] = []

    def device_memory(self) -> SimulatedMemory:
        return SimulatedMemory(1 << 30)

    def encode(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        self.batches.append(list(jobs))
        if self.error is not None:
            raise self.error
        for job in jobs:
            embeddings[list(job.pages)] = int(job.arrays["pixels"].sum())


def rank_of(encoder: Encoder, *, rank: int = 0) -> tuple[EncodeRank, npt.NDArray[np.uint8]]:
    embeddings = np.zeros((6, 4, 8), np.uint8)
    region = np.arange(256, dtype=np.float32).view(np.uint8)

    def read(extent: Extent) -> npt.NDArray[np.uint8]:
        return region[extent.offset : extent.offset + extent.size]

    return EncodeRank(encoder, embeddings, read, rank=rank), embeddings


def task(key: bytes, pages: list[int], *, offset: int = 0, size: int = 32) -> EncodeTask:
    arrays = (ArraySpec("pixels", "float32", (size // 8, 2)),)
    return EncodeTask(key, 4 * len(pages), Extent(offset, size), pages, arrays, b"of " + key)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (RuntimeError("/home/me/model.py: <object at 0x7f>"), EncodeErrorKind.FAILED),
        (AssertionError(), EncodeErrorKind.FAILED),
        (DeviceOutOfMemory("cuda:0 10.0.0.1"), EncodeErrorKind.OUT_OF_MEMORY),
    ],
)
def test_encode_rank_survives_its_worker(
    error: Exception, failure: EncodeErrorKind, caplog: pytest.LogCaptureFixture
) -> None:
    """An error becomes a result without paths, addresses or reprs; the log has the rest."""
    encoder = Encoder(error)
    rank, _ = rank_of(encoder)
    with caplog.at_level(logging.WARNING):
        assert rank.apply(EncodeDecision(1, [task(b"a", [0])])) == EncodeResult(1, failure, 0)
    assert "encode step 1" in caplog.text
    encoder.error = None
    assert rank.apply(EncodeDecision(2, [task(b"a", [0])])) == EncodeResult(2, None, 0)


def test_encode_rank_stops_if_its_device_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal access every call to a GPU fails: the group restarts, instead of failing all images."""
    encoder = Encoder(RuntimeError("CUDA error: an illegal memory access was encountered"))
    memory = SimulatedMemory(1 << 30)

    def available() -> int:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(memory, "available", available)
    monkeypatch.setattr(encoder, "device_memory", lambda: memory)
    rank, _ = rank_of(encoder)
    with pytest.raises(RuntimeError, match="CUDA error"):
        rank.apply(EncodeDecision(1, [task(b"a", [0])]))


class PausingEncoder(Encoder):
    """Encodes in four layers; its output is complete at the end."""

    pauses = True

    def begin(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        self._work, self._left = (jobs, embeddings), 4

    def advance(self, layers: int) -> bool:
        self._left -= min(layers or self._left, self._left)
        if self._left and self.error is None:
            return False
        self.encode(*self._work)
        return True


def test_encode_rank_pauses_and_goes_on() -> None:
    """A few layers at a time, with no output before the end; then the same as at once."""
    rank, found = rank_of(PausingEncoder())
    whole, expected = rank_of(Encoder())
    tasks = [task(b"a", [3, 1])]
    assert whole.apply(EncodeDecision(1, tasks, 100, layers=1)) == EncodeResult(1, None, 0)
    assert rank.apply(EncodeDecision(1, tasks, 100, layers=1)) == Paused(1, 1, 0)
    assert rank.go_on(1, 2) == Paused(1, 2, 0)
    assert not found.any()
    assert rank.go_on(1, 2) == EncodeResult(1, None, 0)
    assert np.array_equal(found, expected)
    assert rank.apply(EncodeDecision(2, tasks)) == EncodeResult(2, None, 0), "whole"
    assert rank.apply(EncodeDecision(3, tasks, 100, layers=3)) == Paused(3, 3, 0)
    assert rank.go_on(3, 0) == EncodeResult(3, None, 0)


def test_encode_rank_that_failed_has_nothing_to_go_on_with() -> None:
    """The batch fails in any layer; its rank takes the next one, but none while another is not done."""
    encoder = PausingEncoder()
    rank, _ = rank_of(encoder)
    tasks = [task(b"a", [0])]
    assert rank.apply(EncodeDecision(1, tasks, 100, layers=1)) == Paused(1, 1, 0)
    with pytest.raises(RankDesync, match="step 2 came while step 1 is not done"):
        rank.apply(EncodeDecision(2, tasks))
    encoder.error = DeviceOutOfMemory("")
    assert rank.go_on(1, 1) == EncodeResult(1, EncodeErrorKind.OUT_OF_MEMORY, 0)
    assert rank.go_on(1, 0) is None
    encoder.error = None
    assert rank.apply(EncodeDecision(2, tasks)) == EncodeResult(2, None, 0)


def test_encode_rank_survives_pixels_of_a_wrong_size() -> None:
    """An extent that is too short for its arrays fails the batch."""
    encoder = Encoder()
    rank, _ = rank_of(encoder)
    for size in (30, 12):
        bad = msgspec.structs.replace(task(b"a", [0]), extent=Extent(0, size))
        result = rank.apply(EncodeDecision(1, [bad]))
        assert result == EncodeResult(1, EncodeErrorKind.FAILED, 0)
    assert encoder.batches == []


@pytest.mark.parametrize("number", [0, 1])
def test_encode_rank_copies_encoded_images(number: int) -> None:
    """Embeddings sent by the client skip the encoder, mixed freely with raw items; the first rank alone writes them."""
    encoder = Encoder()
    rank, embeddings = rank_of(encoder, rank=number)
    encoded = EncodeTask(b"e", 6, Extent(64, 6 * 8), [5, 2], encoded=True)
    result = rank.apply(EncodeDecision(1, [encoded, task(b"a", [3, 1])]))
    assert result == EncodeResult(1, None, 0)
    ((job,),) = encoder.batches
    assert (job.key, job.tokens, job.metadata, job.pages) == (b"a", 8, b"of a", [3, 1])
    assert job.arrays["pixels"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    rows = np.arange(16, 28, dtype=np.float32).view(np.uint8).reshape(6, 8) * (number == 0)
    assert (embeddings[5] == rows[:4]).all()
    assert (embeddings[2, :2] == rows[4:]).all()
    assert not embeddings[2, 2:].any()
