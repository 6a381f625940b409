"""One direction of a link: loss, delay, duplication and corruption of frames."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Annotated, NamedTuple

import msgspec

from vsched.sim.faults.injection import Injector
from vsched.sim.faults.plan import (
    Direction,
    Effect,
    Fault,
    LateHeartbeat,
    LostHeartbeat,
    MessageFault,
    MissedDecision,
    Partition,
)
from vsched.sim.loop.virtual_loop import VirtualLoop
from vsched.transport.zmq_link import QUEUE_MAX
from vsched.wire import Beat, decode_report

_TURN = slice(24, 32)
"""Bytes of a frame that hold the turn of a log entry; nonzero for entries to be executed (`vsched.wire`)."""


class LinkProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Properties of a link without faults, in both directions.

    A frame takes `latency_ns` plus an exponentially distributed time with mean `jitter_ns`; frames
    never overtake each other. With `queue_max` unreceived frames in the queue, further ones are
    refused.
    """

    latency_ns: Annotated[int, msgspec.Meta(ge=0)] = 50_000
    jitter_ns: Annotated[int, msgspec.Meta(ge=0)] = 0
    queue_max: Annotated[int, msgspec.Meta(ge=1)] = QUEUE_MAX


class Party(NamedTuple):
    """Owner of a link, as named by faults; a rank's heartbeat has a separate link."""

    group: str
    rank: int
    pulse: bool


class _Fate(NamedTuple):
    """Fate of a frame: the delay of each effect."""

    late_ns: dict[Effect, int]
    corrupt_at: float


class OneWayLink:
    """One direction of one link."""

    def __init__(
        self,
        loop: VirtualLoop,
        generator: random.Random,
        faults: Injector,
        *,
        profile: LinkProfile,
        party: Party,
        direction: Direction,
        deliver: Callable[[bytes], None],
        unread: Callable[[], int],
    ) -> None:
        self._loop = loop
        self._generator = generator
        self._jitter = random.Random(generator.getrandbits(64))  # noqa: S311
        self._faults = faults
        self._profile = profile
        self._party = party
        self._direction = direction
        self._deliver = deliver
        self._unread = unread
        group, rank = party.group, party.rank
        self._messages = [
            fault
            for fault in faults.of(MessageFault, group=group, rank=rank)
            if fault.direction == direction
        ]
        self._partitions = faults.of(Partition, group=group, rank=rank)
        self._partitions.sort(key=lambda fault: fault.at_ns)
        kinds = _SINGLING[direction]
        self._singled_out = not party.pulse and bool(faults.of(kinds, group=group, rank=rank))
        self._under_way: list[tuple[int, int, bytes]] = []
        self._last_arrival_ns = 0
        self._scheduled = 0

    def send(self, frame: bytes) -> bool:
        """Send a frame; return False without sending if the queue is full."""
        if len(self._under_way) + self._unread() >= self._profile.queue_max:
            return False
        fate = self._draw_fate() if self._messages else _UNHARMED
        late_ns = dict(fate.late_ns)
        if self._singled_out:
            self._single_out(frame, late_ns)
        if "loss" in late_ns:
            return True
        if "corruption" in late_ns and frame:
            frame = _corrupted(frame, fate.corrupt_at)
        arrival_ns = self._loop.now_ns() + self._latency_ns()
        arrival_ns += late_ns.get("delay", 0)
        if "reordering" in late_ns:
            self._dispatch(arrival_ns + late_ns["reordering"], frame)
        else:
            arrival_ns = self._last_arrival_ns = max(arrival_ns, self._last_arrival_ns)
            self._dispatch(arrival_ns, frame)
        if "duplication" in late_ns:
            self._dispatch(arrival_ns + late_ns["duplication"], frame)
        return True

    def _draw_fate(self) -> _Fate:
        """Draw the fate of a frame, with the same number of random draws for every frame."""
        draws = [self._generator.random() for _ in _EFFECTS]
        corrupt_at = self._generator.random()
        now_ns = self._loop.now_ns()
        struck: dict[Effect, int] = {}
        for fault in self._messages:
            strikes = draws[_EFFECTS.index(fault.effect)] < fault.rate
            if strikes and fault.at_ns <= now_ns < fault.end_ns:
                struck[fault.effect] = fault.late_ns
                self._faults.note(fault)
        return _Fate(struck, corrupt_at)

    def _single_out(self, frame: bytes, late_ns: dict[Effect, int]) -> None:
        """Apply a fault that waits for a frame with this content."""
        if not _is_awaited(frame, self._direction):
            return
        kinds = _SINGLING[self._direction]
        fault = self._faults.take(kinds, group=self._party.group, rank=self._party.rank)
        if isinstance(fault, LateHeartbeat):
            late_ns["reordering"] = fault.late_ns
        elif fault is not None:
            late_ns["loss"] = 0

    def _latency_ns(self) -> int:
        profile = self._profile
        if profile.jitter_ns == 0:
            return profile.latency_ns
        return profile.latency_ns + round(self._jitter.expovariate(1 / profile.jitter_ns))

    def _dispatch(self, arrival_ns: int, frame: bytes) -> None:
        """Schedule the arrival of a frame, unless a partition prevents it."""
        now_ns = self._loop.now_ns()
        for partition in self._partitions:
            inside = (partition.at_ns <= when < partition.end_ns for when in (now_ns, arrival_ns))
            if any(inside):
                self._faults.note(partition)
                if partition.frames == "lost":
                    return
                arrival_ns = max(arrival_ns, partition.end_ns + self._profile.latency_ns)
                self._last_arrival_ns = max(arrival_ns, self._last_arrival_ns)
        self._scheduled += 1
        heapq.heappush(self._under_way, (arrival_ns, self._scheduled, frame))
        self._loop.call_at_ns(arrival_ns, self._arrive)

    def _arrive(self) -> None:
        """Deliver the next frame; timers due at the same moment are interchangeable."""
        self._deliver(heapq.heappop(self._under_way)[2])


_EFFECTS: tuple[Effect, ...] = ("loss", "delay", "duplication", "reordering", "corruption")
_SINGLING: dict[Direction, tuple[type[Fault], ...]] = {
    "to_rank": (MissedDecision,),
    "to_leader": (LostHeartbeat, LateHeartbeat),
}
"""Faults that wait for a frame with a certain content."""
_UNHARMED = _Fate({}, 0.0)


def _is_awaited(frame: bytes, direction: Direction) -> bool:
    """Return True for frames that faults wait for: an entry to execute, or a heartbeat reply."""
    if direction == "to_rank":
        return any(frame[_TURN])
    return isinstance(decode_report(frame), Beat)


def _corrupted(frame: bytes, at: float) -> bytes:
    """Return a copy of a frame with one bit flipped, at this share of its length."""
    bit = int(at * len(frame) * 8)
    damaged = bytearray(frame)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)
