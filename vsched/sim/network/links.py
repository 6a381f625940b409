"""In-memory links between leaders and ranks, with network faults.

The ends have the interface of `vsched.transport.zmq_link`, with two differences: a simulated rank
cannot block, so it polls for a frame or waits as a task; and a full queue refuses frames at both
ends.

Without faults a link behaves like ZeroMQ: every frame once, in order. Each direction of each link
has its own random generator, with a fixed number of draws per frame. So one fault more or less does
not change the fate of other frames, and a plan can be minimized fault by fault.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args

import msgspec

from vsched.aio.hosts.link import WINDOW_BYTES
from vsched.sim.faults import (
    Direction,
    Effect,
    Fault,
    HostCut,
    Injector,
    LateHeartbeat,
    LostHeartbeat,
    MessageFault,
    MissedDecision,
    Partition,
    SlowHostLink,
)
from vsched.sim.loop import SECOND_NS, VirtualLoop
from vsched.transport.zmq_link import QUEUE_MAX, OnFrame, pulse_identity, rank_identity
from vsched.wire import Beat, LogEntry, decode_report

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


class OneWayLink:
    """One direction of the link of a rank, or of its heartbeat."""

    def __init__(
        self,
        network: Network,
        end: RankEnd,
        direction: Direction,
        deliver: Callable[[bytes], None],
        unread: Callable[[], int],
    ) -> None:
        place = end.address.rpartition("/")[2]
        seed = f"{network.seed} {place} {end.identity.decode()} {direction}"
        self._generator = random.Random(seed)  # noqa: S311
        self._jitter = random.Random(self._generator.getrandbits(64))  # noqa: S311
        self._loop, self._faults, self._profile = network.loop, network.faults, network.profile
        self._direction = direction
        self._deliver = deliver
        self._unread = unread
        self._target: dict[str, Any] = {"group": end.group, "rank": end.rank}
        self._messages = [
            fault for fault in self._faults.of(MessageFault, **self._target) if fault.direction == direction
        ]  # fmt: skip
        self._partitions = sorted(
            self._faults.of(Partition, **self._target), key=lambda fault: fault.at_ns
        )
        self._singled_out = not end.pulse and bool(
            self._faults.of(_SINGLING[direction], **self._target)
        )
        self._under_way: list[tuple[int, int, bytes]] = []
        self._last_arrival_ns = 0
        self._scheduled = 0

    def send(self, frame: bytes) -> bool:
        """Send a frame; return False without sending if the queue is full."""
        if len(self._under_way) + self._unread() >= self._profile.queue_max:
            return False
        late_ns, corrupt_at = self._draw_effects() if self._messages else ({}, 0.0)
        if self._singled_out and _is_awaited(frame, self._direction):
            fault = self._faults.take_fault(_SINGLING[self._direction], **self._target)
            if isinstance(fault, LateHeartbeat):
                late_ns["reordering"] = fault.late_ns
            elif fault is not None:
                late_ns["loss"] = 0
        if "loss" in late_ns:
            return True
        if "corruption" in late_ns and frame:
            frame = _corrupted(frame, corrupt_at)
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

    def _draw_effects(self) -> tuple[dict[Effect, int], float]:
        """Draw the effects on a frame with their delays, and the place of a corrupt bit.

        The number of random draws is the same for every frame.
        """
        draws = {effect: self._generator.random() for effect in _EFFECTS}
        corrupt_at = self._generator.random()
        now_ns = self._loop.now_ns()
        late_ns: dict[Effect, int] = {}
        for fault in self._messages:
            if draws[fault.effect] < fault.rate and fault.at_ns <= now_ns < fault.end_ns:
                late_ns[fault.effect] = fault.late_ns
                self._faults.record_effect(fault)
        return late_ns, corrupt_at

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
                self._faults.record_effect(partition)
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


_EFFECTS: tuple[Effect, ...] = get_args(Effect)
_SINGLING: dict[Direction, tuple[type[Fault], ...]] = {
    "to_rank": (MissedDecision,),
    "to_leader": (LostHeartbeat, LateHeartbeat),
}
"""Faults that wait for a frame with a certain content."""


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


class Network:
    """All links of a simulation.

    Args:
        loop: Provides the clock.
        rng: Seeds the links; drawn from once.
        faults: Injects `MessageFault`, `Partition`, `MissedDecision`, `LostHeartbeat` and
            `LateHeartbeat`.
        profile: Properties of links without faults.

    Attributes:
        leaders: The open ends of leaders, by address.
        ranks: The open ends of ranks and of their heartbeats, by address and identity.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        faults: Injector,
        *,
        profile: LinkProfile = LinkProfile(),  # noqa: B008 - it is immutable
    ) -> None:
        self.loop = loop
        self.seed = rng.getrandbits(64)
        self.faults = faults
        self.profile = profile
        self.leaders: dict[str, SimulatedLeaderEnd] = {}
        self.ranks: dict[tuple[str, bytes], RankEnd] = {}

    def listen(self, address: str, on_frame: OnFrame) -> SimulatedLeaderEnd:
        """Open a leader's end, to which ranks can connect; its group is named in the address."""
        assert address not in self.leaders, f"{address} has a leader"
        leader = self.leaders[address] = SimulatedLeaderEnd(self, address, on_frame)
        return leader

    def connect(self, address: str, rank: int, *, pulse: bool = False) -> RankEnd:
        """Open a rank's end, or its heartbeat's end; nothing is delivered while no leader listens."""
        end = RankEnd(self, address, rank, pulse=pulse)
        assert (address, end.identity) not in self.ranks, f"{end.identity!r} is connected"
        self.ranks[address, end.identity] = end
        return end


class SimulatedLeaderEnd:
    """The leader's end of a group's links; has the interface of `zmq_link.LeaderLink`."""

    def __init__(self, network: Network, address: str, on_frame: OnFrame) -> None:
        self.address = address
        self._network = network
        self._on_frame = on_frame
        self._closed = False

    def carry(self, entry: LogEntry) -> None:
        """No-op: simulated ranks access the arena directly."""

    def send(self, rank: int, frame: bytes) -> bool:
        """Send a frame to a rank; return False if the rank is gone or its queue is full."""
        end = self._network.ranks.get((self.address, rank_identity(rank)))
        return not self._closed and end is not None and end.to_rank.send(frame)

    def read(self) -> None:
        """No-op: frames are handled on arrival."""

    def handle_frame(self, identity: bytes, frame: bytes) -> None:
        """Handle an arrived frame, unless the end is closed."""
        if not self._closed:
            self._on_frame(identity, frame)

    def close(self) -> None:
        """Stop listening."""
        if not self._closed:
            self._closed = True
            del self._network.leaders[self.address]


class RankEnd:
    """A rank's end of a link; has the interface of `zmq_link.RankLink`, but nothing blocks.

    Attributes:
        group: Its group; `generate-1` for `ipc:///run/generate-1-4`, the fourth start.
        pulse: Whether it is that of the rank's heartbeat, which has a separate link.
    """

    def __init__(self, network: Network, address: str, rank: int, *, pulse: bool) -> None:
        self.address = address
        self.identity = pulse_identity(rank) if pulse else rank_identity(rank)
        self.group = address.rpartition("/")[2].rpartition("-")[0]
        self.rank = rank
        self.pulse = pulse
        self.waiting: list[asyncio.Future[None]] = []
        self.closed = False
        self._network = network
        self._inbox: deque[bytes] = deque()
        self.to_rank = OneWayLink(
            network, self, "to_rank", self._queue_frame, lambda: len(self._inbox)
        )
        self._to_leader = OneWayLink(network, self, "to_leader", self._deliver_report, lambda: 0)

    def send(self, frame: bytes) -> bool:
        """Send a report; return False if the queue is full."""
        assert not self.closed, "a closed link sends nothing"
        return self._to_leader.send(frame)

    def receive(self, timeout_s: float = 0.0) -> bytes | None:
        """Return the next arrived frame, or None; never waits."""
        del timeout_s
        return self._inbox.popleft() if self._inbox else None

    @property
    def readable(self) -> bool:
        """Whether an unreceived frame has arrived."""
        return bool(self._inbox)

    def close(self) -> None:
        """Close; frames in flight to the leader still arrive, as after a process exit."""
        if not self.closed:
            self.closed = True
            self._inbox.clear()
            del self._network.ranks[self.address, self.identity]
            self._wake()

    def _queue_frame(self, frame: bytes) -> None:
        if not self.closed:
            self._inbox.append(frame)
            self._wake()

    def _deliver_report(self, frame: bytes) -> None:
        leader = self._network.leaders.get(self.address)
        if leader is not None:
            leader.handle_frame(self.identity, frame)

    def _wake(self) -> None:
        for waiter in self.waiting:
            if not waiter.done():
                waiter.set_result(None)


async def wait_readable(ends: Sequence[RankEnd], timeout_s: float | None) -> bool:
    """Wait until an end has a frame or is closed; return True if one has a frame.

    Blocks: up to the timeout.
    """
    if not any(end.readable or end.closed for end in ends):
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for end in ends:
            end.waiting.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            return any(end.readable for end in ends)
        finally:
            for end in ends:
                end.waiting.remove(waiter)
    return any(end.readable for end in ends)


class HostLinkProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Properties of the links between an engine and other hosts, in both directions.

    A frame is sent at `bytes_per_s`, and arrives after `latency_ns` plus an exponentially
    distributed time with mean `jitter_ns`. At most `window_bytes` are in flight per start of a
    worker group.
    """

    latency_ns: Annotated[int, msgspec.Meta(ge=0)] = 200_000
    jitter_ns: Annotated[int, msgspec.Meta(ge=0)] = 0
    bytes_per_s: Annotated[float, msgspec.Meta(gt=0)] = 125e6
    window_bytes: Annotated[int, msgspec.Meta(ge=2)] = WINDOW_BYTES


class LinkDirection:
    """One direction of the link to a host."""

    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        faults: Injector,
        host: str,
        profile: HostLinkProfile,
    ) -> None:
        self._loop = loop
        self._rng = rng
        self._faults = faults
        self._profile = profile
        self._slow = [one for one in faults.of(SlowHostLink) if one.host == host]
        self._cuts = [one for one in faults.of(HostCut) if one.host == host]
        self._cuts.sort(key=lambda fault: fault.at_ns)
        self._free_ns = 0

    def arrival_ns(self, size: int) -> int:
        """Return when a frame of this size sent now arrives; later frames are sent after it."""
        now_ns, profile, factor = self._loop.now_ns(), self._profile, 1.0
        for slow in self._slow:
            if slow.at_ns <= now_ns < slow.end_ns:
                factor *= slow.factor
                self._faults.record_effect(slow)
        leaves_ns = max(now_ns, self._free_ns) + round(
            factor * size * SECOND_NS / profile.bytes_per_s
        )
        way_ns = round(factor * profile.latency_ns)
        if profile.jitter_ns:
            way_ns += round(self._rng.expovariate(1 / profile.jitter_ns))
        for cut in self._cuts:
            if cut.at_ns <= leaves_ns + way_ns and now_ns < cut.end_ns:
                leaves_ns = max(leaves_ns, cut.end_ns)
                self._faults.record_effect(cut)
        self._free_ns = leaves_ns
        return leaves_ns + way_ns
