"""The control plane: no message is lost after an edge; the rest is in `tests/contract/test_transports.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import zmq

from tests.patience import patience
from vsched.transport.zmq_link import LeaderLink, RankLink, rank_identity, wait_readable

Frame = tuple[bytes, bytes]


@pytest.fixture
async def context() -> AsyncIterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


class Leading:
    """A leader's link that keeps received messages."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.received: list[Frame] = []
        self._changed = asyncio.Event()
        self.link = LeaderLink(context, address, self._on_frame)

    def _on_frame(self, identity: bytes, frame: bytes) -> None:
        self.received.append((identity, frame))
        self._changed.set()

    async def receive(self, count: int) -> list[Frame]:
        async with patience():
            while len(self.received) < count:
                await self._changed.wait()
                self._changed.clear()
        return self.received


@pytest.fixture
async def leading(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> AsyncIterator[Leading]:
    leading = Leading(context, f"ipc://{tmp_path}/group")
    yield leading
    leading.link.close()


@pytest.fixture
def connect(leading: Leading) -> Iterator[Callable[[int], RankLink]]:
    links: list[RankLink] = []

    def connect(rank: int) -> RankLink:
        links.append(RankLink(leading.link.address, rank))
        return links[-1]

    yield connect
    for link in links:
        link.socket.setsockopt(zmq.LINGER, 0)
        link.close()


def receive(link: RankLink, count: int) -> list[bytes]:
    """Receive this number of messages, blocking."""
    messages: list[bytes] = []
    while len(messages) < count:
        message = link.receive(10)
        if message is None:
            break
        messages.append(message)
    return messages


async def test_link_drains_everything_behind_one_edge(
    leading: Leading, connect: Callable[[int], RankLink]
) -> None:
    """The descriptor only signals a change: all messages are read, in order."""
    link = connect(0)
    frames = [b"%d" % index for index in range(900)]  # fewer than make a sender wait
    for frame in frames:
        link.send(frame)
    received = await leading.receive(len(frames))
    assert received == [(rank_identity(0), frame) for frame in frames]


async def test_link_hears_reports_whose_edge_a_send_has_swallowed(
    leading: Leading, connect: Callable[[int], RankLink]
) -> None:
    """Sending processes the socket's commands, and with them the edge of messages that arrived meanwhile."""
    link = connect(0)
    link.send(b"hello")
    await leading.receive(1)
    for index in range(50):
        # The report arrives while the loop is kept from its descriptor.
        link.send(b"report %d" % index)
        assert zmq.Poller().poll(0) == []
        assert leading.link.send(0, b"decision %d" % index)
        assert receive(link, 1) == [b"decision %d" % index]
        await leading.receive(2 + index)
    assert len(leading.received) == 51


async def test_link_drops_messages_of_another_shape(
    leading: Leading, connect: Callable[[int], RankLink]
) -> None:
    """A report is one frame; anything else is dropped."""
    link = connect(0)
    link.socket.send_multipart([b"two", b"frames"])
    link.socket.send_multipart([b"", b"", b""])
    link.send(b"one frame")
    assert await leading.receive(1) == [(rank_identity(0), b"one frame")]


async def test_link_second_peer_with_a_rank_identity_is_not_heard(
    leading: Leading, connect: Callable[[int], RankLink]
) -> None:
    """The place of a connected rank cannot be taken over."""
    link = connect(0)
    link.send(b"hello")
    await leading.receive(1)
    thief = connect(0)
    thief.send(b"I am rank 0")
    link.send(b"no, I am")
    assert await leading.receive(2) == [
        (rank_identity(0), b"hello"),
        (rank_identity(0), b"no, I am"),
    ]
    assert leading.link.send(0, b"for the first")
    assert receive(link, 1) == [b"for the first"]
    assert thief.receive() is None


async def test_link_rank_hears_nothing_for_the_timeout(
    leading: Leading, connect: Callable[[int], RankLink]
) -> None:
    """The wait ends after its timeout."""
    link = connect(0)
    assert not wait_readable([link], 0.001)
    assert link.receive() is None
