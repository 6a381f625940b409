"""One direction of a link: loss, delay, duplication and corruption of frames."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import msgspec

from vsched.sim.faults.injection import Injector
from vsched.sim.faults.plan import (
    MILLISECOND_NS,
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

ShareOfFrames = Annotated[float, msgspec.Meta(ge=0, le=1)]


class LinkProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Properties of a link, in both directions.

    A frame takes `latency_ns` plus a random time from the distribution `jitter` with mean
    `jitter_ns`; frames never overtake each other. `loss` to `corruption` are the shares of frames
    with this effect; `late_ns` is the additional delay, as in `MessageFault`. With `queue_max`
    unreceived frames in the queue, further ones are refused.
    """

    latency_ns: Annotated[int, msgspec.Meta(ge=0)] = 50_000
    jitter_ns: Annotated[int, msgspec.Meta(ge=0)] = 0
    jitter: Literal["uniform", "exponential"] = "exponential"
    loss: ShareOfFrames = 0.0
    delay: ShareOfFrames = 0.0
    duplication: ShareOfFrames = 0.0
    reordering: ShareOfFrames = 0.0
    corruption: ShareOfFrames = 0.0
    late_ns: Annotated[int, msgspec.Meta(ge=0)] = 10 * MILLISECOND_NS
    queue_max: Annotated[int, msgspec.Meta(ge=1)] = QUEUE_MAX


class LinkStatistics(msgspec.Struct, frozen=True):
    """Frame counts: `sent` were accepted, `refused` found the queue full, `unheard` found the other end closed."""

    sent: int = 0
    refused: int = 0
    delivered: int = 0
    unheard: int = 0
    lost: int = 0
    delayed: int = 0
    duplicated: int = 0
    reordered: int = 0
    corrupted: int = 0


class Party(NamedTuple):
    """Owner of a link, as named by faults; a rank's heartbeat has a separate link."""

    group: str
    rank: int
    pulse: bool


class _Fate(NamedTuple):
    """Fate of a frame: the delay of each effect."""

    late_ns: dict[Effect, int]
    corrupt_at: float


class Channel:
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
        deliver: Callable[[bytes], bool],
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
        risks = (getattr(profile, effect) for effect in _EFFECTS)
        self._risky = bool(self._messages) or any(risks)
        self._under_way: list[tuple[int, int, bytes]] = []
        self._last_arrival_ns = 0
        self._scheduled = 0
        self._counts: dict[str, int] = dict.fromkeys(LinkStatistics.__struct_fields__, 0)

    def send(self, frame: bytes) -> bool:
        """Send a frame; return False without sending if the queue is full."""
        if len(self._under_way) + self._unread() >= self._profile.queue_max:
            self._counts["refused"] += 1
            return False
        self._counts["sent"] += 1
        fate = self._draw_fate() if self._risky else _UNHARMED
        late_ns = dict(fate.late_ns)
        if self._singled_out:
            self._single_out(frame, late_ns)
        if "loss" in late_ns:
            self._counts["lost"] += 1
            return True
        if "corruption" in late_ns and frame:
            self._counts["corrupted"] += 1
            frame = _corrupted(frame, fate.corrupt_at)
        arrival_ns = self._loop.now_ns() + self._latency_ns()
        if "delay" in late_ns:
            self._counts["delayed"] += 1
            arrival_ns += late_ns["delay"]
        if "reordering" in late_ns:
            self._counts["reordered"] += 1
            self._dispatch(arrival_ns + late_ns["reordering"], frame)
        else:
            arrival_ns = self._last_arrival_ns = max(arrival_ns, self._last_arrival_ns)
            self._dispatch(arrival_ns, frame)
        if "duplication" in late_ns:
            self._counts["duplicated"] += 1
            self._dispatch(arrival_ns + late_ns["duplication"], frame)
        return True

    def _draw_fate(self) -> _Fate:
        """Draw the fate of a frame, with the same number of random draws for every frame."""
        draws = [self._generator.random() for _ in _EFFECTS]
        corrupt_at = self._generator.random()
        profile, now_ns = self._profile, self._loop.now_ns()
        struck: dict[Effect, int] = {}
        for effect, draw in zip(_EFFECTS, draws, strict=True):
            if draw < getattr(profile, effect):
                struck[effect] = profile.late_ns
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
        if profile.jitter == "uniform":
            return profile.latency_ns + self._jitter.randint(0, 2 * profile.jitter_ns)
        return profile.latency_ns + round(self._jitter.expovariate(1 / profile.jitter_ns))

    def _dispatch(self, arrival_ns: int, frame: bytes) -> None:
        """Schedule the arrival of a frame, unless a partition prevents it."""
        now_ns = self._loop.now_ns()
        for partition in self._partitions:
            inside = (partition.at_ns <= when < partition.end_ns for when in (now_ns, arrival_ns))
            if any(inside):
                self._faults.note(partition)
                if partition.frames == "lost":
                    self._counts["lost"] += 1
                    return
                arrival_ns = max(arrival_ns, partition.end_ns + self._profile.latency_ns)
                self._last_arrival_ns = max(arrival_ns, self._last_arrival_ns)
        self._scheduled += 1
        heapq.heappush(self._under_way, (arrival_ns, self._scheduled, frame))
        self._loop.call_at_ns(arrival_ns, self._arrive)

    def _arrive(self) -> None:
        """Deliver the next frame; timers due at the same moment are interchangeable."""
        frame = heapq.heappop(self._under_way)[2]
        self._counts["delivered" if self._deliver(frame) else "unheard"] += 1

    def statistics(self) -> LinkStatistics:
        """Return the frame counts."""
        return LinkStatistics(**self._counts)


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
