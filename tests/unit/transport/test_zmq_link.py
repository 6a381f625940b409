"""The control plane: no message is lost after an edge, and pulses; see `tests/contract/test_transports.py`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import zmq

from tests.patience import patience
from vsched.transport.zmq_link import (
    LeaderLink,
    PulseThread,
    RankLink,
    pulse_identity,
    rank_identity,
)
from vsched.wire import Hello, Pulse, RankReport, decode_report

Frame = tuple[bytes, bytes]


class Leading:
    """Leader's link; stores received messages, and fails at messages with the prefix `bad`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.received: list[Frame] = []
        self._changed = asyncio.Event()
        self.link = LeaderLink(context, address, self._on_frame)

    def _on_frame(self, identity: bytes, frame: bytes) -> None:
        self.received.append((identity, frame))
        self._changed.set()
        if frame.startswith(b"bad"):
            raise RuntimeError("a progress bar")

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
        assert link.receive(10) == b"decision %d" % index
        await leading.receive(2 + index)
    assert len(leading.received) == 51


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
    assert link.receive(10) == b"for the first"
    assert thief.receive() is None


async def test_link_goes_on_after_a_report_that_could_not_be_taken(
    leading: Leading, connect: Callable[[int], RankLink], caplog: pytest.LogCaptureFixture
) -> None:
    """The descriptor is edge-triggered: if an exception stopped the drain, the frames behind it would never be read.

    A report is one frame, of 72 MB with all log-probabilities for 32 requests; anything else is dropped.
    """
    link = connect(0)
    link.socket.send_multipart([b"two", b"frames"])
    link.socket.send_multipart([b"", b"", b""])
    sent = [b"first", b"bad", b"ready", b"bad too", bytes(72_000_000), b"bad again", b"last"]
    for frame in sent:
        link.send(frame)
    assert [frame for _, frame in await leading.receive(len(sent))] == sent
    assert caplog.text.count("RuntimeError: a progress bar") == 3


@pytest.mark.slow
def test_pulse_proves_itself_and_beats(tmp_path: Path) -> None:
    """The secret first, then beats, even while its rank is too busy to report."""
    address = f"ipc://{tmp_path}/group"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    leader = context.socket(zmq.ROUTER)
    leader.bind(address)
    link = RankLink(address, 3)
    pulse = PulseThread(link, 3, "sesame", every_s=0.01)
    received: list[RankReport] = []
    while len(received) < 4:
        assert leader.poll(5000)
        identity, frame = leader.recv_multipart()
        assert identity == pulse_identity(3)
        received.append(decode_report(frame))
    assert received == [Hello(3, "sesame"), Pulse(), Pulse(), Pulse()]
    pulse.close()
    link.close()
    context.destroy(linger=0)
    assert not any(thread.name == "pulse" for thread in threading.enumerate())


def test_pulse_without_a_leader_ends_at_once(tmp_path: Path) -> None:
    """Nothing is queued without bound, and closing does not wait."""
    link = RankLink(f"ipc://{tmp_path}/nobody", 0)
    usual = threading.stack_size()
    pulse = PulseThread(link, 0, "sesame", every_s=60)
    assert threading.stack_size() == usual
    pulse.close()
    link.socket.setsockopt(zmq.LINGER, 0)
    link.close()
