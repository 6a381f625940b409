"""The memory of the encoder's worst batch, measured on simulated memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from tests.unit.rank.fake_plugin import FakePlugin
from tests.unit.worker.device_fakes import MIB, MeasuredEncoder, model_info, plan_of
from vsched.errors import DeviceOutOfMemory
from vsched.policy import RankMemory, Reservation
from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.types import ModelInfo
from vsched.worker.contract import EncodeJob, ImagePlan, WorkerPlugin, WorkerSettings
from vsched.worker.sizing import REPEATS_MAX, ROUNDS_OF_GROUP, BatchArena, reserve_encoder
from vsched.worker.spec import EncodeRole

ROLE = EncodeRole(
    address="", plugin="fake", settings=WorkerSettings(), items=8, tokens=32, pixels_max=1000
)
LARGE, SMALL = plan_of(32), plan_of(4)


class Builder(FakePlugin):
    """Names two candidates, and records the caps of its calls."""

    def __init__(self) -> None:
        self.caps: list[tuple[int, int, int]] = []

    def worst_batches(
        self, info: ModelInfo, *, items: int, tokens: int, pixels_max: int
    ) -> list[list[ImagePlan]]:
        self.caps.append((items, tokens, pixels_max))
        return [[SMALL] * 2, [LARGE]]


def reserve(
    plugin: WorkerPlugin | None = None,
    worker: MeasuredEncoder | None = None,
    *,
    total_bytes: int = 256 * MIB,
    **changes: Any,
) -> tuple[RankMemory, Reservation, MeasuredEncoder]:
    worker = worker or MeasuredEncoder(SimulatedMemory(total_bytes))
    role = msgspec.structs.replace(ROLE, **changes)
    found = reserve_encoder(plugin or Builder(), worker, model_info(), role, rank=2)
    return *found, worker


def test_reserve_runs_the_worst_batch_and_holds_the_mark() -> None:
    """Every candidate runs, the largest twice, which adds nothing; the growth is the peak less the memory before."""
    loaded, reservation, worker = reserve()
    assert worker.batches == [[4, 4], [32], [32]]
    growth = 32 * worker.token_bytes
    assert reservation == Reservation(rank=2, pool="simulated", growth_bytes=growth, held=True)
    assert worker.memory.reserved() == loaded.reserved_bytes + reservation.growth_bytes
    assert loaded.weights_bytes == worker.weights_bytes


class Scattering(MeasuredEncoder):
    """Keeps `kept_bytes` of each of its first `count` batches, like caches and compiled code."""

    def __init__(
        self, memory: SimulatedMemory, *, count: int = 5, kept_bytes: int = 20 * MIB
    ) -> None:
        super().__init__(memory)
        self.count, self.kept_bytes = count, kept_bytes

    def encode(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        super().encode(jobs, embeddings)
        if len(self.batches) <= self.count:
            self.memory.allocate(self.kept_bytes)


class Drifting(SimulatedMemory):
    """The allocator may take a quarter more than was measured, and 3 MiB."""

    def drift(self, growth_bytes: int) -> int:
        return growth_bytes // 4 + 3 * MIB


class Host(SimulatedMemory):
    """Freed memory belongs to no process."""

    def free(self, handle: int) -> None:
        super().free(handle)
        self.release()


@pytest.mark.parametrize(("memory", "growth_mib"), [(Host, 32), (Drifting, 32 + 8 + 3)])
def test_reserve_names_the_memory_that_others_must_leave_free(
    memory: type[SimulatedMemory], growth_mib: int
) -> None:
    """Where the allocator gave it back, and where it may take more than was measured."""
    _, reservation, _ = reserve(worker=MeasuredEncoder(memory(256 * MIB)))
    assert (reservation.growth_bytes, reservation.held) == (growth_mib * MIB, False)


def test_reserve_repeats_the_largest_candidate_until_it_adds_nothing() -> None:
    """Memory that batches keep is part of the needs of a later worst batch."""
    loaded, reservation, worker = reserve(worker=Scattering(SimulatedMemory(1024 * MIB)))
    # The fifth kept the last of it, and the seventh added nothing.
    assert worker.batches == [[4, 4], *[[32]] * 6]
    for batch in [[LARGE], [SMALL] * 2, [LARGE]]:
        arena = BatchArena(model_info(), [batch])
        worker.encode(arena.jobs(batch), arena.embeddings)
    assert worker.memory.peak() - loaded.reserved_bytes == reservation.growth_bytes


@pytest.mark.parametrize(("kept_bytes", "repeats"), [(MIB // 2, 1), (20 * MIB, 5)])
def test_reserve_repeats_no_more_than_the_drift_has_room_for(kept_bytes: int, repeats: int) -> None:
    """A run of the largest batch takes seconds, and some small thing is always new."""
    _, _, worker = reserve(worker=Scattering(Drifting(1024 * MIB), kept_bytes=kept_bytes))
    assert len(worker.batches) == 2 + repeats


def test_reserve_gives_up_on_an_ever_growing_encoder(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and the start continues with the measured values."""
    _, _, worker = reserve(worker=Scattering(SimulatedMemory(1024 * MIB), count=100))
    assert len(worker.batches) == 2 + REPEATS_MAX
    assert "encode.reserved" in caplog.text


@pytest.mark.parametrize("count", [0, 100])
def test_reserve_runs_as_many_rounds_on_every_rank_of_a_group(count: int) -> None:
    """Ranks encode together, so none may stop by its own measurements alone."""
    growing = Scattering(SimulatedMemory(1024 * MIB), count=count)
    _, _, worker = reserve(worker=growing, settings=WorkerSettings(ranks=2))
    assert len(worker.batches) == 2 * ROUNDS_OF_GROUP


def test_reserve_gives_every_cap_to_the_search() -> None:
    """Count, tokens and pixels."""
    plugin = Builder()
    reserve(plugin, items=3, tokens=77, pixels_max=555)
    assert plugin.caps == [(3, 77, 555)]


def test_reserve_names_the_knobs_when_memory_runs_out() -> None:
    """A start-up error with batch, value, limit, the settings to change, and the ledger."""
    with pytest.raises(DeviceOutOfMemory) as raised:
        reserve(total_bytes=45 * MIB)
    for words in (
        "1 images with 32 tokens",
        "encode.admission.max_tokens",
        "media.image_pixels_max",
        "encode.memory_limit",
        "encode.reserved",
        "45.0 MiB = encode rank 2 weights",
    ):
        assert words in str(raised.value)


def test_reserve_takes_the_override_and_holds_it() -> None:
    """No batch runs; the memory must be there, and is held."""
    loaded, reservation, worker = reserve(reserved_bytes=100 * MIB)
    assert worker.batches == []
    assert (reservation.growth_bytes, reservation.held) == (100 * MIB, True)
    assert worker.memory.reserved() - loaded.reserved_bytes == 100 * MIB
    _, nothing, _ = reserve(reserved_bytes=0)
    assert (nothing.growth_bytes, nothing.held) == (0, False)
    with pytest.raises(DeviceOutOfMemory, match=r"encode\.reserved: .*value \d+, limit \d+"):
        reserve(reserved_bytes=1 << 40)


def test_reserve_warns_without_a_builder(caplog: pytest.LogCaptureFixture) -> None:
    """And names the override."""
    with caplog.at_level(logging.WARNING):
        _, reservation, worker = reserve(FakePlugin())
    assert (reservation.growth_bytes, worker.batches) == (0, [])
    assert "encode.reserved" in caplog.text
