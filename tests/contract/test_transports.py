"""Every transport keeps the contract, and broken transports are refused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import zmq

from vsched.sim.faults import Direction, Effect, FaultPlan, Injector, MessageFault
from vsched.sim.loop import VirtualLoop
from vsched.sim.network.links import LinkProfile, Network, RankEnd, SimulatedLeaderEnd
from vsched.testing import ContractBroken, check_transport
from vsched.testing.contracts.transport import Bounds, Transport
from vsched.transport.zmq_link import QUEUE_MAX, LeaderLink, OnFrame, RankLink, rank_identity

ADDRESS = "ipc:///run/generate-0-1"
MS = 1_000_000


class ZmqTransport:
    """Sockets in a folder of this host, as in production."""

    def __init__(self, folder: Path) -> None:
        self._address = f"ipc://{folder}/group"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ranks: list[RankLink] = []

    def listen(self, on_frame: OnFrame) -> LeaderLink:
        self._leader = LeaderLink(self._context, self._address, on_frame)
        return self._leader

    def connect(self, rank: int) -> RankLink:
        self._ranks.append(RankLink(self._address, rank))
        return self._ranks[-1]

    def close(self) -> None:
        self._leader.close()
        for rank in self._ranks:
            if not rank.socket.closed:
                rank.socket.setsockopt(zmq.LINGER, 0)
                rank.close()
        self._context.destroy(linger=0)


class SimTransport:
    """Links in memory, on a virtual clock."""

    leader_type = SimulatedLeaderEnd

    def __init__(self, effect: Effect | None = None, *, queue_max: int = QUEUE_MAX) -> None:
        """Create a network; `effect` strikes every fiftieth frame."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        faults = [
            MessageFault(
                duration_ns=1 << 60,
                group="generate-0",
                rank=rank,
                direction=direction,
                effect=effect,
                rate=0.02,
            )
            for rank in range(3)
            for direction in get_args(Direction)
            if effect is not None
        ]
        profile = LinkProfile(jitter_ns=0 if effect else MS, queue_max=queue_max)
        injector = Injector(FaultPlan(faults=tuple(faults)), loop)
        self.network = Network(loop, random.Random(0), injector, profile=profile)

    def listen(self, on_frame: OnFrame) -> SimulatedLeaderEnd:
        return self.network.listen(ADDRESS, on_frame)

    def connect(self, rank: int) -> RankEnd:
        return self.network.connect(ADDRESS, rank)

    def close(self) -> None:
        """The network ends with its loop."""


@pytest.mark.slow
async def test_zmq_transport_keeps_the_contract(tmp_path: Path) -> None:
    """Over real sockets."""
    count = iter(range(100))

    def make() -> ZmqTransport:
        folder = tmp_path / str(next(count))
        folder.mkdir()
        return ZmqTransport(folder)

    await check_transport(make, bounds=Bounds(quiet_s=0.01))


@pytest.mark.sim
@pytest.mark.parametrize("seed", range(2))
async def test_sim_transport_keeps_the_contract(seed: int) -> None:
    """In memory, so that findings of a simulation also hold for the sockets."""
    await check_transport(SimTransport, seed=seed)


BROKEN: dict[str, Callable[[], SimTransport]] = {
    "misses": lambda: SimTransport("loss"),
    "another order": lambda: SimTransport("reordering"),
    r"20[1-9] frames of 200": lambda: SimTransport("duplication"),
    "nobody sent": lambda: SimTransport("corruption"),
    "must return False at some time": lambda: SimTransport(queue_max=1 << 20),
}


@pytest.mark.sim
@pytest.mark.parametrize("complaint", BROKEN)
async def test_check_transport_refuses_a_network_with_faults(complaint: str) -> None:
    """Loss, reordering, duplication, damage, and a queue without a bound."""
    # Greetings may be hit, too; another seed spares them.
    with pytest.raises(ContractBroken, match=complaint):
        await check_transport(BROKEN[complaint], seed=1)


class Broadcasting(SimTransport):
    """Frames for a missing rank go to an existing one."""

    def listen(self, on_frame: OnFrame) -> SimulatedLeaderEnd:
        leader = super().listen(on_frame)
        send = leader.send

        def everywhere(rank: int, frame: bytes) -> bool:
            known = self.network.rank_at(ADDRESS, rank_identity(rank)) is not None
            return send(rank, frame) if known else not send(0, frame)

        leader.send = everywhere  # type: ignore[method-assign]
        return leader


class Hushing(SimTransport):
    """Reports frames for a missing rank as sent."""

    def listen(self, on_frame: OnFrame) -> SimulatedLeaderEnd:
        leader = super().listen(on_frame)
        send = leader.send
        leader.send = lambda rank, frame: send(rank, frame) or True  # type: ignore[method-assign]
        return leader


class Anonymous(SimTransport):
    """Attributes every report to rank 0."""

    def listen(self, on_frame: OnFrame) -> SimulatedLeaderEnd:
        return super().listen(lambda _, frame: on_frame(rank_identity(0), frame))


class Undying(SimTransport):
    """Keeps listening once closed."""

    def listen(self, on_frame: OnFrame) -> SimulatedLeaderEnd:
        leader = super().listen(on_frame)
        leader.close = lambda: None  # type: ignore[method-assign]
        return leader


class Stalling(SimTransport):
    """One queue for all ranks together."""

    def listen(self, on_frame: OnFrame) -> SimulatedLeaderEnd:
        leader = super().listen(on_frame)
        send, full = leader.send, False

        def shared(rank: int, frame: bytes) -> bool:
            nonlocal full
            taken = not full and send(rank, frame)
            full = full or (not taken and rank == 0)
            return taken

        leader.send = shared  # type: ignore[method-assign]
        return leader


class Forgetful(SimTransport):
    """A rank that leaves takes its reports with it."""

    def connect(self, rank: int) -> RankEnd:
        end = super().connect(rank)
        report = end._report
        end._to_leader._deliver = lambda frame: None if end.closed else report(frame)
        return end


@pytest.mark.sim
@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (Broadcasting, "rank 0 received a frame that nobody sent"),
        (Hushing, "was never there must return False"),
        (Anonymous, "reports came from"),
        (Undying, "must return False after `close`"),
        (Stalling, "rank 1 got nothing"),
        (Forgetful, "last words of a rank that closes"),
    ],
)
async def test_check_transport_refuses(broken: Callable[[], Transport], complaint: str) -> None:
    """Each part of the contract has a transport that breaks only that part."""
    with pytest.raises(ContractBroken, match=complaint):
        await check_transport(broken)


@pytest.mark.sim
async def test_check_transport_names_what_an_end_lacks() -> None:
    class Mute(SimTransport):
        def connect(self, rank: int) -> RankEnd:
            return object()  # type: ignore[return-value]

    with pytest.raises(ContractBroken, match=r"no method `send`.*no method `close`"):
        await check_transport(Mute)
