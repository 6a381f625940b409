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
import random
import re
from collections import deque
from collections.abc import Callable, Sequence

from vsched.sim.faults.injection import Injector
from vsched.sim.faults.plan import Direction
from vsched.sim.loop.virtual_loop import VirtualLoop
from vsched.sim.network.channel import LinkProfile, OneWayLink, Party
from vsched.transport.zmq_link import OnFrame, pulse_identity, rank_identity
from vsched.wire import LogEntry


class Network:
    """All links of a simulation.

    Args:
        loop: Provides the clock.
        rng: Seeds the links; drawn from once.
        faults: Injects `MessageFault`, `Partition`, `MissedDecision`, `LostHeartbeat` and
            `LateHeartbeat`.
        profile: Properties of links without faults.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        rng: random.Random,
        faults: Injector,
        *,
        profile: LinkProfile = LinkProfile(),  # noqa: B008 - it is immutable
    ) -> None:
        self._loop = loop
        self._seed = rng.getrandbits(64)
        self._faults = faults
        self._profile = profile
        self._leaders: dict[str, SimulatedLeaderEnd] = {}
        self._ranks: dict[tuple[str, bytes], RankEnd] = {}

    def listen(
        self, address: str, on_frame: OnFrame, *, group: str | None = None
    ) -> SimulatedLeaderEnd:
        """Open a leader's end, to which ranks can connect.

        `group` is its name in faults; by default the last part of the address, without the number
        of the start.
        """
        assert address not in self._leaders, f"{address} has a leader"
        leader = self._leaders[address] = SimulatedLeaderEnd(self, address, on_frame, group)
        return leader

    def connect(self, address: str, rank: int, *, pulse: bool = False) -> RankEnd:
        """Open a rank's end, or its heartbeat's end; nothing is delivered while no leader listens."""
        identity = pulse_identity(rank) if pulse else rank_identity(rank)
        assert (address, identity) not in self._ranks, f"{identity!r} is connected to {address}"
        leader = self._leaders.get(address)
        party = Party(leader.group if leader else group_of(address), rank, pulse=pulse)
        end = RankEnd(self, address, identity, party)
        self._ranks[address, identity] = end
        return end

    def open_channel(
        self,
        end: RankEnd,
        direction: Direction,
        deliver: Callable[[bytes], None],
        unread: Callable[[], int],
    ) -> OneWayLink:
        """Create one direction of a new link."""
        place = end.address.rpartition("/")[2]
        generator = random.Random(  # noqa: S311
            f"{self._seed} {place} {end.identity.decode()} {direction}"
        )
        return OneWayLink(
            self._loop,
            generator,
            self._faults,
            profile=self._profile,
            party=end.party,
            direction=direction,
            deliver=deliver,
            unread=unread,
        )

    def leader_at(self, address: str) -> SimulatedLeaderEnd | None:
        """Return the leader's end at an address."""
        return self._leaders.get(address)

    def rank_at(self, address: str, identity: bytes) -> RankEnd | None:
        """Return the rank's end with this address and identity."""
        return self._ranks.get((address, identity))

    def forget_leader(self, address: str) -> None:
        """Remove the leader's end at an address."""
        self._leaders.pop(address, None)

    def forget_rank(self, address: str, identity: bytes) -> None:
        """Remove the rank's end with this identity."""
        self._ranks.pop((address, identity), None)


class SimulatedLeaderEnd:
    """The leader's end of a group's links; has the interface of `zmq_link.LeaderLink`."""

    def __init__(
        self, network: Network, address: str, on_frame: OnFrame, group: str | None
    ) -> None:
        self.address = address
        self.group = group or group_of(address)
        self._network = network
        self._on_frame = on_frame
        self._closed = False

    def carry(self, entry: LogEntry) -> None:
        """No-op: simulated ranks access the arena directly."""

    def send(self, rank: int, frame: bytes) -> bool:
        """Send a frame to a rank; return False if the rank is gone or its queue is full."""
        end = self._network.rank_at(self.address, rank_identity(rank))
        return not self._closed and end is not None and end.to_rank.send(frame)

    def read(self) -> None:
        """No-op: frames are handled on arrival."""

    def take(self, identity: bytes, frame: bytes) -> None:
        """Handle an arrived frame, unless the end is closed."""
        if not self._closed:
            self._on_frame(identity, frame)

    def close(self) -> None:
        """Stop listening."""
        if not self._closed:
            self._closed = True
            self._network.forget_leader(self.address)


class RankEnd:
    """A rank's end of a link; has the interface of `zmq_link.RankLink`, but nothing blocks."""

    def __init__(self, network: Network, address: str, identity: bytes, party: Party) -> None:
        self.address = address
        self.identity = identity
        self.party = party
        self.waiting: list[asyncio.Future[None]] = []
        self._network = network
        self._inbox: deque[bytes] = deque()
        self._closed = False
        self.to_rank = network.open_channel(self, "to_rank", self._take, lambda: len(self._inbox))
        self._to_leader = network.open_channel(self, "to_leader", self._report, lambda: 0)

    def send(self, frame: bytes) -> bool:
        """Send a report; return False if the queue is full."""
        assert not self._closed, "a closed link sends nothing"
        return self._to_leader.send(frame)

    def receive(self, timeout_s: float = 0.0) -> bytes | None:
        """Return the next arrived frame, or None; never waits."""
        del timeout_s
        return self._inbox.popleft() if self._inbox else None

    async def next_frame(self, timeout_s: float | None = None) -> bytes | None:
        """Wait for the next frame; return None on timeout or when the link is closed.

        Blocks: up to the timeout.
        """
        await wait_readable([self], timeout_s)
        return self.receive()

    @property
    def readable(self) -> bool:
        """Whether an unreceived frame has arrived."""
        return bool(self._inbox)

    @property
    def closed(self) -> bool:
        """Whether the rank has closed it."""
        return self._closed

    def close(self) -> None:
        """Close; frames in flight to the leader still arrive, as after a process exit."""
        if not self._closed:
            self._closed = True
            self._inbox.clear()
            self._network.forget_rank(self.address, self.identity)
            self._wake()

    def _take(self, frame: bytes) -> None:
        if not self._closed:
            self._inbox.append(frame)
            self._wake()

    def _report(self, frame: bytes) -> None:
        leader = self._network.leader_at(self.address)
        if leader is not None:
            leader.take(self.identity, frame)

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


def group_of(address: str) -> str:
    """Return the group in an address: `generate-1` for `ipc:///run/generate-1-4`, its fourth start."""
    place = address.rpartition("/")[2]
    named = re.fullmatch(r"([a-z]+-\d+)-\d+", place)
    return named[1] if named else place
