"""Links between a leader and its ranks: sockets, and those of the simulator, which findings of a simulation rely on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq

from tests.patience import PATIENCE_S
from vsched.aio.leader import LeaderEnd
from vsched.sim.faults import FaultPlan, Injector
from vsched.sim.loop import VirtualLoop
from vsched.sim.network.links import LinkProfile, Network
from vsched.transport.zmq_link import LeaderLink, OnFrame, RankLink, rank_identity
from vsched.worker.member import MemberLink

RANKS = 3
DEAF_MAX = 20_000
"""Frames after which a rank that does not read must have been noticed."""


class Links:
    """A leader and its ranks, with the frames that each has received."""

    def __init__(
        self, listen: Callable[[OnFrame], LeaderEnd], connect: Callable[[int], MemberLink]
    ) -> None:
        self.received: list[tuple[bytes, bytes]] = []
        self.got: list[list[bytes]] = []
        self.ranks: list[MemberLink] = []
        self.rng = random.Random(0)
        self.leader = listen(lambda sender, frame: self.received.append((sender, frame)))
        self._connect = connect

    def connect(self) -> MemberLink:
        self.got.append([])
        self.ranks.append(self._connect(len(self.ranks)))
        return self.ranks[-1]

    async def meet(self, ranks: int = RANKS) -> None:
        for _ in range(ranks):
            self.connect().send(b"hello")
        await self.receive(ranks)
        assert {sender for sender, _ in self.received} == set(map(rank_identity, range(ranks)))
        self.received.clear()

    async def receive(self, count: int) -> list[bytes]:
        """Return the frames that the leader has received: `count`, and no further ones."""
        await until(lambda: len(self.received) >= count)
        await asyncio.sleep(0.02)
        self.leader.read()
        assert len(self.received) == count
        return [frame for _, frame in self.received]

    async def take(self, rank: int, count: int) -> list[bytes]:
        """Return the frames that a rank has received: `count`, and no further ones."""

        def enough() -> bool:
            while (frame := self.ranks[rank].receive()) is not None:
                self.got[rank].append(frame)
            return len(self.got[rank]) >= count

        await until(enough)
        await asyncio.sleep(0.02)
        enough()
        assert len(self.got[rank]) == count
        return self.got[rank]

    def frames(self, count: int) -> list[bytes]:
        return [b"%d " % n + self.rng.randbytes(self.rng.randrange(300)) for n in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    loop = asyncio.get_running_loop()
    until_s = loop.time() + PATIENCE_S
    while not condition() and loop.time() < until_s:  # noqa: ASYNC110 - links do not notify
        await asyncio.sleep(0.001)


async def decisions_arrive_in_order(links: Links) -> None:
    await links.meet()
    sent = [links.frames(200) for _ in range(RANKS)]
    for turn in range(200):
        for rank in links.rng.sample(range(RANKS), RANKS):
            assert links.leader.send(rank, sent[rank][turn])
        if turn % 50 == 0:
            await asyncio.sleep(0)
    for rank, frames in enumerate(sent):
        assert await links.take(rank, 200) == frames


async def reports_arrive_in_order_with_their_senders(links: Links) -> None:
    await links.meet()
    sent = [links.frames(200) for _ in range(RANKS)]
    for turn in range(200):
        for rank in links.rng.sample(range(RANKS), RANKS):
            links.ranks[rank].send(sent[rank][turn])
        if turn % 20 == 0:
            links.leader.send(turn % RANKS, b"meanwhile")
            links.leader.read()
            await asyncio.sleep(0)
    await links.receive(200 * RANKS)
    for rank, frames in enumerate(sent):
        own = [frame for sender, frame in links.received if sender == rank_identity(rank)]
        assert own == frames


async def frames_arrive_whole(links: Links) -> None:
    await links.meet(1)
    lengths = [1, 2, 255, 256, 257, 65_535, 65_537, 1 << 20]
    sent = [bytes(range(256)), *map(links.rng.randbytes, lengths)]
    for frame in sent:
        assert links.leader.send(0, frame)
        links.ranks[0].send(frame)
    assert await links.take(0, len(sent)) == sent
    assert await links.receive(len(sent)) == sent


async def unknown_ranks_receive_nothing(links: Links) -> None:
    await links.meet(1)
    assert links.leader.send(1, b"for 1") is False
    links.connect()
    assert links.leader.send(0, b"for 0") is True
    assert await links.take(0, 1) == [b"for 0"]
    assert await links.take(1, 0) == []


async def a_rank_that_does_not_read_stalls_no_other(links: Links) -> None:
    """It is reported soon, and loses nothing."""
    await links.meet(2)
    frame, taken, others = links.rng.randbytes(4096), 0, list[bytes]()
    while links.leader.send(0, b"%d " % taken + frame):
        taken += 1
        assert taken < DEAF_MAX
        if taken % 100 == 0:
            others.append(b"%d" % taken)
            assert links.leader.send(1, others[-1])
            assert await links.take(1, len(others)) == others
    others.append(b"still here")
    assert links.leader.send(1, others[-1])
    assert await links.take(1, len(others)) == others
    assert await links.take(0, taken) == [b"%d " % number + frame for number in range(taken)]


async def a_closed_rank_is_noticed_and_its_last_frames_arrive(links: Links) -> None:
    await links.meet(2)
    sent = links.frames(20)
    for frame in sent:
        links.ranks[0].send(frame)
    links.ranks[0].close()
    assert await links.receive(20) == sent
    await until(lambda: not links.leader.send(0, b"anybody?"))
    assert not links.leader.send(0, b"anybody?")
    assert links.leader.send(1, b"you")
    assert await links.take(1, 1) == [b"you"]


async def a_closed_leader_neither_sends_nor_receives(links: Links) -> None:
    await links.meet(2)
    links.leader.close()
    links.leader.close()
    assert not links.leader.send(0, b"late")
    links.ranks[1].send(b"too late")
    links.leader.read()
    await links.receive(0)
    assert await links.take(0, 0) == []
    assert links.ranks[0].receive(0.001) is None


CHECKS: list[Callable[[Links], Awaitable[None]]] = [
    decisions_arrive_in_order,
    reports_arrive_in_order_with_their_senders,
    frames_arrive_whole,
    unknown_ranks_receive_nothing,
    a_rank_that_does_not_read_stalls_no_other,
    a_closed_rank_is_noticed_and_its_last_frames_arrive,
    a_closed_leader_neither_sends_nor_receives,
]


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
async def test_links_over_sockets(
    check: Callable[[Links], Awaitable[None]],
    tmp_path: Path,
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    address = f"ipc://{tmp_path}/group"
    links = Links(
        lambda on_frame: LeaderLink(context, address, on_frame),
        lambda rank: RankLink(address, rank),
    )
    try:
        await check(links)
    finally:
        links.leader.close()
        for rank in links.ranks:
            assert isinstance(rank, RankLink)
            if not rank.socket.closed:
                rank.socket.setsockopt(zmq.LINGER, 0)
                rank.close()


@pytest.mark.sim
@pytest.mark.parametrize("check", CHECKS)
async def test_links_of_the_simulator(check: Callable[[Links], Awaitable[None]]) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    profile = LinkProfile(jitter_ns=1_000_000)
    network = Network(loop, random.Random(0), Injector(FaultPlan(), loop), profile=profile)
    address = "ipc:///run/generate-0-1"
    await check(
        Links(
            lambda on_frame: network.listen(address, on_frame),
            lambda rank: network.connect(address, rank),
        )
    )
