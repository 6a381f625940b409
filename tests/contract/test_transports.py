"""The sockets of production and the links of simulations keep one contract, so findings of a simulation hold for both.

Frames arrive whole, once and in order, at the addressed rank, or at the leader with the identity of their sender.
`send` never waits, and returns False for a rank that never connected, has closed, or has not read for long; other
ranks are not affected. A closed leader neither sends nor receives; the last frames of a closed rank arrive.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import pytest
import zmq

from tests.patience import patience
from vsched.aio.leader import LeaderEnd
from vsched.sim.faults import FaultPlan, Injector
from vsched.sim.loop import VirtualLoop
from vsched.sim.network.links import LinkProfile, Network, RankEnd, SimulatedLeaderEnd
from vsched.transport.zmq_link import LeaderLink, OnFrame, RankLink, rank_identity
from vsched.worker.member import MemberLink

ADDRESS = "ipc:///run/generate-0-1"
RANKS = 3
POLL_S = 0.001
QUIET_S = 0.01
"""Time to wait for unexpected frames; later ones are not detected."""
FRAMES_MAX = 20_000
"""`send` must return False before this number of frames to a rank that never reads."""


class Transport(Protocol):
    """The links of one group."""

    def listen(self, on_frame: OnFrame) -> LeaderEnd: ...
    def connect(self, rank: int) -> MemberLink: ...
    def close(self) -> None: ...


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

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self._network = Network(
            loop,
            random.Random(0),
            Injector(FaultPlan(), loop),
            profile=LinkProfile(jitter_ns=1_000_000),
        )

    def listen(self, on_frame: OnFrame) -> SimulatedLeaderEnd:
        return self._network.listen(ADDRESS, on_frame)

    def connect(self, rank: int) -> RankEnd:
        return self._network.connect(ADDRESS, rank)

    def close(self) -> None:
        """The network ends with its loop."""


class Bench:
    """A leader and its ranks, with the frames that each has received."""

    def __init__(self, transport: Transport) -> None:
        self.rng = random.Random(0)
        self.received: list[tuple[bytes, bytes]] = []
        self.got: list[list[bytes]] = []
        self.ranks: list[MemberLink] = []
        self._transport = transport
        self.leader = transport.listen(lambda sender, frame: self.received.append((sender, frame)))
        self.send = self.leader.send

    async def meet(self, ranks: int = RANKS) -> None:
        """Connect ranks; each sends a hello."""
        for rank in range(ranks):
            self.connect(rank).send(b"hello")
        await self.receive(ranks)
        assert sorted(sender for sender, _ in self.received) == [*map(rank_identity, range(ranks))]
        self.received.clear()

    def connect(self, rank: int) -> MemberLink:
        self.ranks.append(self._transport.connect(rank))
        self.got.append([])
        return self.ranks[-1]

    async def receive(self, count: int) -> None:
        """Wait until the leader has received `count` frames, then for unexpected ones."""
        await self.until(lambda: len(self.received) >= count)
        await asyncio.sleep(QUIET_S)
        self.leader.read()
        assert len(self.received) == count

    async def take(self, rank: int, count: int) -> list[bytes]:
        """Wait until a rank has received `count` frames, then for unexpected ones."""

        def read() -> int:
            while (frame := self.ranks[rank].receive()) is not None:
                self.got[rank].append(frame)
            return len(self.got[rank])

        await self.until(lambda: read() >= count)
        await asyncio.sleep(QUIET_S)
        read()
        return self.got[rank]

    async def until(self, condition: Callable[[], object]) -> None:
        async with patience():
            while not condition():  # noqa: ASYNC110 - ends tell nobody
                await asyncio.sleep(POLL_S)

    def frames(self, count: int) -> list[bytes]:
        """Return distinct frames of random lengths."""
        rng = self.rng
        return [b"%d " % n + rng.randbytes(rng.randrange(300)) for n in range(count)]


async def decisions_arrive_in_order(bench: Bench) -> None:
    await bench.meet()
    sent = [bench.frames(200) for _ in range(RANKS)]
    for turn in range(200):
        for rank in bench.rng.sample(range(RANKS), RANKS):
            assert bench.send(rank, sent[rank][turn]) is True
        if turn % 50 == 0:
            await asyncio.sleep(0)
    for rank, frames in enumerate(sent):
        assert await bench.take(rank, len(frames)) == frames


async def reports_arrive_in_order(bench: Bench) -> None:
    """Each with its sender's identity, while the leader sends as well."""
    await bench.meet()
    sent = [bench.frames(200) for _ in range(RANKS)]
    for turn in range(200):
        for rank in bench.rng.sample(range(RANKS), RANKS):
            bench.ranks[rank].send(sent[rank][turn])
        if turn % 20 == 0:
            bench.send(turn % RANKS, b"meanwhile")
            bench.leader.read()
            await asyncio.sleep(0)
    await bench.receive(200 * RANKS)
    for rank, frames in enumerate(sent):
        known = rank_identity(rank)
        assert [frame for sender, frame in bench.received if sender == known] == frames


async def frames_are_whole(bench: Bench) -> None:
    """With any bytes and of any length."""
    await bench.meet(1)
    lengths = [1, 2, 255, 256, 257, 65_535, 65_537, 1 << 20]
    sent = [bytes(range(256)), *(bench.rng.randbytes(length) for length in lengths)]
    for frame in sent:
        assert bench.send(0, frame)
        bench.ranks[0].send(frame)
    assert await bench.take(0, len(sent)) == sent
    await bench.receive(len(sent))
    assert [frame for _, frame in bench.received] == sent


async def unknown_ranks_get_nothing(bench: Bench) -> None:
    await bench.meet(1)
    assert bench.send(1, b"for 1") is False
    bench.connect(1)
    assert bench.send(0, b"for 0")
    assert await bench.take(0, 1) == [b"for 0"]
    assert await bench.take(1, 0) == []


async def deaf_ranks_stall_nobody(bench: Bench) -> None:
    """A rank that never reads is reported, without loss, and without effect on other ranks."""
    await bench.meet(2)
    frame, taken = bench.rng.randbytes(4096), 0
    others: list[bytes] = []
    while bench.send(0, b"%d " % taken + frame):
        taken += 1
        assert taken < FRAMES_MAX
        if taken % 100 == 0:
            others.append(b"%d" % taken)
            assert bench.send(1, others[-1])
            assert await bench.take(1, len(others)) == others
    others.append(b"still here")
    assert bench.send(1, others[-1])
    assert await bench.take(1, len(others)) == others
    assert await bench.take(0, taken) == [b"%d " % number + frame for number in range(taken)]


async def ranks_that_go_are_noticed(bench: Bench) -> None:
    """The last frames of a closed rank arrive, `send` soon returns False, and others continue."""
    await bench.meet(2)
    sent = [*bench.frames(20), b"farewell"]
    for frame in sent:
        bench.ranks[0].send(frame)
    bench.ranks[0].close()
    await bench.receive(len(sent))
    assert [frame for _, frame in bench.received] == sent
    await bench.until(lambda: not bench.send(0, b"anybody?"))
    assert bench.send(1, b"you")
    assert await bench.take(1, 1) == [b"you"]


async def close_ends_everything(bench: Bench) -> None:
    """Also twice."""
    await bench.meet(2)
    bench.leader.close()
    bench.leader.close()
    assert bench.send(0, b"late") is False
    bench.ranks[1].send(b"too late")
    bench.leader.read()
    await bench.receive(0)
    assert await bench.take(0, 0) == []
    assert bench.ranks[0].receive(0.001) is None


CLAIMS: tuple[Callable[[Bench], Awaitable[None]], ...] = (
    decisions_arrive_in_order,
    reports_arrive_in_order,
    frames_are_whole,
    unknown_ranks_get_nothing,
    deaf_ranks_stall_nobody,
    ranks_that_go_are_noticed,
    close_ends_everything,
)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
async def test_zmq_transport(tmp_path: Path, claim: Callable[[Bench], Awaitable[None]]) -> None:
    transport = ZmqTransport(tmp_path)
    try:
        await claim(Bench(transport))
    finally:
        transport.close()


@pytest.mark.sim
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
async def test_sim_transport(claim: Callable[[Bench], Awaitable[None]]) -> None:
    await claim(Bench(SimTransport()))
