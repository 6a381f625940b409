"""A snapshot of a scheduler is complete and plain data: nothing in it names a class or a function."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.unit.kernel.policy_pool import Locked, Stubborn, random_policies
from tests.unit.kernel.setups import outcome
from tests.workers.properties import thorough
from vsched.errors import RecordError
from vsched.kernel import Scheduler, SchedulerLimits
from vsched.kernel.commands import Command
from vsched.kernel.events import Event
from vsched.policy import CachePolicy, RecordableOrder
from vsched.policy_host import SeatPolicies
from vsched.policy_host.snapshot import SnapshotError, encode_snapshot, restore_snapshot
from vsched.testing import ModelCluster, run_random
from vsched.testing.cluster import default_policies
from vsched_policies.eviction import LruOrder, S3Fifo

LIMITS = SchedulerLimits(blocks=8, slots=2, context_tokens=64, pages=4)


class RestoredCluster(ModelCluster):
    """Restores its scheduler before every event, and compares all fields before every tenth."""

    def __init__(self, limits: SchedulerLimits, policies: SeatPolicies | None) -> None:
        self.policies = policies or default_policies()
        self.handled = 0
        super().__init__(limits, self.policies)

    def _handle(self, event: Event) -> list[Command]:
        state = encode_snapshot(self.kernel)
        restored = restore_snapshot(Scheduler(self.limits, self.policies), state)
        assert encode_snapshot(restored) == state
        assert restored.statistics() == self.kernel.statistics()
        self.handled += 1
        if not self.handled % 10:
            assert [*differing(self.kernel, restored, "scheduler", set())] == []
        self.kernel = restored
        return super()._handle(event)


@pytest.mark.parametrize("seed", [1, 2, *thorough(0)])
def test_snapshot_holds_all_that_decides(seed: int) -> None:
    """A run whose scheduler is restored before every event decides as one without restarts.

    Every field of a kernel object is saved, derived or constant: one that is not declared and changes is found.
    """

    def run(make: type[ModelCluster]) -> ModelCluster:
        rng = random.Random(seed)
        policies = random_policies(rng) if seed % 2 else None
        return run_random(rng, policies, events=50, make=make)

    plain, cluster = run(ModelCluster), run(RestoredCluster)
    assert outcome(cluster) == outcome(plain)
    assert isinstance(cluster, RestoredCluster)
    assert cluster.handled > 20


CACHES = {
    *("DirtyGroups", "Loads", "Holds", "Router.state", "Router.seen", "PolicyFaults.first"),
    "PolicySeat.failed",
}
"""Fields and whole classes that may differ in a restored scheduler; no decision depends on them."""


def differing(one: Any, other: Any, path: str, seen: set[int]) -> Iterator[str]:
    """Yield the paths of differences between two objects of one class, in all fields of all objects below them."""
    kind = type(one)
    if one is other or id(one) in seen or kind.__name__ in CACHES:
        return
    if kind is not type(other):
        yield path
    elif isinstance(one, RecordableOrder):
        yield from differing(one.state(), other.state(), f"{path}.state()", seen)
    elif isinstance(one, dict):
        yield from differing(sorted(one), sorted(other), f"{path} keys", seen)
        yield from differing([*one.values()], [other.get(key) for key in one], path, seen)
    elif isinstance(one, list | tuple | deque):
        if len(one) != len(other):
            yield path
        for index, pair in enumerate(zip(one, other, strict=False)):
            yield from differing(*pair, f"{path}[{index}]", seen)
    elif kind.__module__.startswith("vsched."):
        seen.add(id(one))
        for name in field_names(one):
            if f"{kind.__name__}.{name}" not in CACHES:
                values = getattr(one, name), getattr(other, name, None)
                yield from differing(*values, f"{path}.{name}", seen)
    elif not callable(one) and kind.__module__ != "msgspec.msgpack" and one != other:
        yield path


def field_names(one: object) -> list[str]:
    slots = [name for cls in type(one).__mro__ for name in getattr(cls, "__slots__", ())]
    return [*getattr(one, "__struct_fields__", slots), *getattr(one, "__dict__", ())]


class SilentOrder(LruOrder[Any]):
    state = None  # type: ignore[assignment]


class Silent(CachePolicy, frozen=True, kw_only=True):
    def build_order(self) -> SilentOrder:
        return SilentOrder()


@pytest.mark.parametrize(
    ("eviction", "message"),
    [(Locked(early=True), "lock"), (Silent(), "SilentOrder has no methods state")],
)
def test_snapshot_names_the_value_that_it_cannot_take(eviction: CachePolicy, message: str) -> None:
    kernel = Scheduler(LIMITS, default_policies(generate_eviction=eviction))
    with pytest.raises(RecordError, match=message):
        encode_snapshot(kernel)


def test_snapshot_reports_an_order_that_cannot_take_its_state() -> None:
    state = encode_snapshot(Scheduler(LIMITS, default_policies(generate_eviction=Stubborn())))
    with pytest.raises(RecordError, match=r"S3FifoOrder\.restore\(\) failed"):
        restore_snapshot(Scheduler(LIMITS, default_policies(generate_eviction=S3Fifo())), state)


def spoil(path: list[Any], value: Any) -> bytes:
    """Return a state with one value replaced."""
    state = msgspec.msgpack.decode(encode_snapshot(Scheduler(LIMITS, default_policies())))
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
        spoil(["draining"], [["no such group"]]),
        spoil(["groups"], {}),
        spoil(["groups", "generate", "status"], "asleep"),
        spoil(["groups", "generate", "running", "decoding"], [[7]]),
        spoil(["groups", "generate", "pool", "by_hash"], {b"hash": 99}),
        spoil(["groups", "encode", "batch"], [[b"no such item"]]),
        spoil(["table", "live"], {1: {"number": 1}}),
    ],
)
def test_snapshot_refuses_input_that_is_malformed(data: bytes) -> None:
    with pytest.raises(SnapshotError):
        restore_snapshot(Scheduler(LIMITS, default_policies()), data)
