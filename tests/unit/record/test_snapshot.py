"""The state of a scheduler is data: whole again afterwards, and nothing in it names a class or a function."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from tests.unit.kernel.policy_pool import random_policies
from tests.unit.record.odd_policies import Locked, Ring, Silent
from vsched.errors import RecordError
from vsched.kernel import KernelPolicies, Scheduler, SchedulerLimits
from vsched.kernel.commands import Command
from vsched.kernel.events import Event
from vsched.policy import EvictionPolicy
from vsched.record.snapshot import SnapshotError, encode_state, restore_scheduler
from vsched.testing import ModelCluster, run_random
from vsched.testing.defaults import default_policies
from vsched_policies.eviction import KeepNothing, Lru, S3Fifo

LIMITS = SchedulerLimits(blocks=8, slots=2, context_tokens=64, pages=4)


class RestoredCluster(ModelCluster):
    """Goes on with a restored scheduler after every event."""

    def __init__(self, limits: SchedulerLimits, policies: KernelPolicies | None) -> None:
        self.policies = policies or default_policies()
        super().__init__(limits, self.policies)

    def _handle(self, event: Event) -> list[Command]:
        before = encode_state(self.kernel)
        restored = restore_scheduler(before, self.limits, self.policies)
        assert encode_state(restored) == before
        assert restored.statistics() == self.kernel.statistics()
        self.kernel = restored
        return super()._handle(event)


@pytest.mark.parametrize("seed", range(12))
def test_snapshot_holds_all_that_decides(seed: int) -> None:
    """A run whose scheduler is restored before every event decides as one whose scheduler lives on."""
    decided: list[list[str]] = []
    for make in (ModelCluster, RestoredCluster):
        rng = random.Random(seed)
        policies = random_policies(rng) if seed % 2 else None
        commands: list[str] = []
        cluster = run_random(rng, policies, make=noting(make, commands))
        assert cluster.kernel.statistics()["waiting"] == 0
        decided.append(commands)
    assert decided[0] == decided[1]


def noting(make: type[ModelCluster], commands: list[str]) -> type[ModelCluster]:
    """Return a cluster class that notes what was decided."""

    class Noting(make):  # type: ignore[valid-type, misc]
        def _handle(self, event: Event) -> list[Command]:
            found: list[Command] = super()._handle(event)
            commands.extend(map(repr, found))
            return found

    return Noting


@pytest.mark.parametrize("eviction", [Lru(), S3Fifo(ghosts=4), KeepNothing(), Ring()])
def test_snapshot_keeps_the_state_of_an_eviction_order(eviction: EvictionPolicy) -> None:
    policies = default_policies(prefix_eviction=eviction, embedding_eviction=eviction)
    run_random(random.Random(1), policies, events=200, make=RestoredCluster)


@pytest.mark.parametrize(
    ("eviction", "message"),
    [(Locked(early=True), "lock"), (Silent(), "SilentOrder has no methods state")],
)
def test_snapshot_says_what_it_cannot_take(eviction: EvictionPolicy, message: str) -> None:
    kernel = Scheduler(LIMITS, default_policies(prefix_eviction=eviction))
    with pytest.raises(RecordError, match=message):
        encode_state(kernel)


def test_snapshot_reports_an_order_that_cannot_take_its_state() -> None:
    state = encode_state(Scheduler(LIMITS, default_policies(prefix_eviction=Ring())))
    with pytest.raises(RecordError, match=r"S3FifoOrder\.restore\(\) failed"):
        restore_scheduler(state, LIMITS, default_policies(prefix_eviction=S3Fifo()))


def spoil(path: list[Any], value: Any) -> bytes:
    """Return a state with one value replaced."""
    state = msgspec.msgpack.decode(encode_state(Scheduler(LIMITS, default_policies())))
    place = state
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return msgspec.msgpack.encode(state)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode({"table": {}}),
        spoil(["timer_ns"], "soon"),
        spoil(["draining"], ["no such group"]),
        spoil(["generators"], []),
        spoil(["generators", 0, "status"], "asleep"),
        spoil(["generators", 0, "running", "decoding"], [7]),
        spoil(["generators", 0, "pool", "published"], [(99, b"hash")]),
        spoil(["encode", "groups", 0, "batch"], [b"no such item"]),
        spoil(["table", "requests"], [{"number": 1}]),
    ],
)
def test_snapshot_refuses_what_is_malformed(data: bytes) -> None:
    with pytest.raises(SnapshotError):
        restore_scheduler(data, LIMITS, default_policies())
