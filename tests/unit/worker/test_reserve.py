"""The memory of the encoder's worst batch, measured on simulated memory."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Sequence
from types import ModuleType

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from tests.programs import printed_by
from tests.unit.rank.fake_plugin import FakePlugin
from tests.unit.worker.device_fakes import MIB, MeasuredEncoder, model_info, plan_of
from vsched.errors import DeviceOutOfMemory
from vsched.policy import RankMemory, Reservation
from vsched.sim.ranks.device_memory import SimulatedMemory
from vsched.types import ModelInfo
from vsched.worker import memory, sizing
from vsched.worker.contract import EncodeJob, ImagePlan, WorkerPlugin, WorkerSettings
from vsched.worker.sizing import REPEATS_MAX, ROUNDS_OF_GROUP, BatchArena, reserve_encoder
from vsched.worker.spec import EncodeRole

ROLE = EncodeRole(
    address="",
    plugin="fake",
    settings=WorkerSettings(),
    items=8,
    tokens=32,
    pixels_max=1000,
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
    plugin: WorkerPlugin | None = None, *, total_bytes: int = 256 * MIB, **changes: int
) -> tuple[RankMemory, Reservation, MeasuredEncoder]:
    worker = MeasuredEncoder(SimulatedMemory(total_bytes))
    role = msgspec.structs.replace(ROLE, **changes)
    found = reserve_encoder(plugin or Builder(), worker, model_info(), role, rank=2)
    return *found, worker


def test_reserve_runs_the_worst_batch_and_holds_the_mark() -> None:
    """Every candidate runs, the largest twice, which adds nothing; the growth is the peak less the memory before."""
    loaded, reservation, worker = reserve()
    assert worker.batches == [[4, 4], [32], [32]]
    assert reservation == Reservation(
        rank=2, pool="simulated", growth_bytes=32 * worker.token_bytes, held=True
    )
    assert worker.memory.reserved() == loaded.reserved_bytes + reservation.growth_bytes
    assert loaded.weights_bytes == worker.weights_bytes


def test_reserve_reports_when_the_allocator_gave_it_back() -> None:
    """On a host, freed memory belongs to no process: the reservation states that others must leave it free."""

    class Host(SimulatedMemory):
        def free(self, handle: int) -> None:
            super().free(handle)
            self.release()

    worker = MeasuredEncoder(Host(256 * MIB))
    _, reservation = reserve_encoder(Builder(), worker, model_info(), ROLE)
    assert (reservation.growth_bytes, reservation.held) == (32 * MIB, False)


class Scattering(MeasuredEncoder):
    """Keeps `kept_bytes` of each of its first `count` batches, like caches and compiled code."""

    count, kept_bytes = 5, 20 * MIB

    def encode(self, jobs: Sequence[EncodeJob], embeddings: npt.NDArray[np.uint8]) -> None:
        super().encode(jobs, embeddings)
        if len(self.batches) <= self.count:
            self.memory.allocate(self.kept_bytes)


class Drifting(SimulatedMemory):
    """The allocator may take a quarter more than was measured, and 3 MiB."""

    def drift(self, growth_bytes: int) -> int:
        return growth_bytes // 4 + 3 * MIB


def test_reserve_repeats_the_largest_candidate_until_it_adds_nothing() -> None:
    """Memory that batches keep is part of the needs of a later worst batch."""
    worker = Scattering(SimulatedMemory(1024 * MIB))
    loaded, reservation = reserve_encoder(Builder(), worker, model_info(), ROLE)
    assert worker.batches == [[4, 4], *[[32]] * 6], (
        "the fifth kept the last of it, and the seventh added nothing"
    )
    for batch in [[LARGE], [SMALL] * 2, [LARGE]]:
        arena = BatchArena(model_info(), [batch])
        worker.encode(arena.jobs(batch), arena.embeddings)
    assert worker.memory.peak() - loaded.reserved_bytes == reservation.growth_bytes


@pytest.mark.parametrize(("kept_bytes", "repeats"), [(MIB // 2, 1), (20 * MIB, 5)])
def test_reserve_repeats_no_more_for_what_the_drift_has_room_for(
    kept_bytes: int, repeats: int
) -> None:
    """A run of the largest batch takes seconds, and some small thing is always new."""
    worker = Scattering(Drifting(1024 * MIB))
    worker.kept_bytes, worker.count = kept_bytes, 5
    reserve_encoder(Builder(), worker, model_info(), ROLE)
    assert len(worker.batches) == 2 + repeats


def test_reserve_gives_up_on_an_encoder_that_never_stops_growing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged, and the start continues with the measured values."""
    worker = Scattering(SimulatedMemory(1024 * MIB))
    worker.count = 100
    reserve_encoder(Builder(), worker, model_info(), ROLE)
    assert len(worker.batches) == 2 + REPEATS_MAX
    assert "encode.reserved" in caplog.text


def test_reserve_runs_as_many_rounds_on_every_rank_of_a_group() -> None:
    """Ranks encode together, so none may stop by its own measurements alone."""
    for count in (0, 100):
        worker = Scattering(SimulatedMemory(1024 * MIB))
        worker.count = count
        role = msgspec.structs.replace(ROLE, settings=WorkerSettings(ranks=2))
        reserve_encoder(Builder(), worker, model_info(), role)
        assert len(worker.batches) == 2 * ROUNDS_OF_GROUP


def test_reserve_adds_what_may_drift() -> None:
    """On top of the peak, if batches ran."""
    worker = MeasuredEncoder(Drifting(256 * MIB))
    _, reservation = reserve_encoder(Builder(), worker, model_info(), ROLE)
    assert (reservation.growth_bytes, reservation.held) == (43 * MIB, False)


def test_reserve_gives_every_cap_to_the_search() -> None:
    """Count, tokens and pixels."""
    plugin = Builder()
    reserve(plugin, items=3, tokens=77, pixels_max=555)
    assert plugin.caps == [(3, 77, 555)]


def test_reserve_names_the_knobs_when_memory_runs_out() -> None:
    """A start-up error with batch, value, limit and the settings to change."""
    with pytest.raises(DeviceOutOfMemory) as raised:
        reserve(total_bytes=45 * MIB)
    message = str(raised.value)
    assert "1 images with 32 tokens" in message
    for knob in (
        "encode.admission.max_tokens",
        "media.image_pixels_max",
        "encode.memory_limit",
        "encode.reserved",
    ):
        assert knob in message
    assert "45.0 MiB = encode rank 2 weights" in message, "the ledger is quoted"


def test_reserve_takes_the_override_and_holds_it() -> None:
    """No batch runs, and the memory is still held."""
    loaded, reservation, worker = reserve(reserved_bytes=100 * MIB)
    assert worker.batches == []
    assert (reservation.growth_bytes, reservation.held) == (100 * MIB, True)
    assert worker.memory.reserved() - loaded.reserved_bytes == 100 * MIB
    _, nothing, _ = reserve(reserved_bytes=0)
    assert (nothing.growth_bytes, nothing.held) == (0, False)


def test_reserve_refuses_an_override_that_is_not_there() -> None:
    """The memory must be there."""
    with pytest.raises(DeviceOutOfMemory, match=r"encode\.reserved: .*value \d+, limit \d+"):
        reserve(reserved_bytes=1 << 40)


def test_reserve_warns_without_a_builder(caplog: pytest.LogCaptureFixture) -> None:
    """And names the override."""
    with caplog.at_level(logging.WARNING):
        _, reservation, worker = reserve(FakePlugin())
    assert (reservation.growth_bytes, worker.batches) == (0, [])
    assert "encode.reserved" in caplog.text


@pytest.mark.slow
def test_reserve_has_no_import_cycle_with_models() -> None:
    """The model's side can be imported first, and reservation code never imports a model."""
    program = """
import sys
import vsched_workers.memory.worst_case, vsched_workers.memory.out_of_memory
import vsched.worker.sizing, vsched_workers.plugin
assert "torch" not in sys.modules, "torch came along"
"""
    printed_by(program)


@pytest.mark.parametrize("module", [memory, sizing], ids=lambda module: module.__name__)
def test_worst_cases_come_from_no_environment(module: ModuleType) -> None:
    """Worst cases follow from the model's configuration and the caps, which all ranks share."""
    text = inspect.getsource(module)
    assert not re.search(r"\benviron\b|\bgetenv\b", text)
