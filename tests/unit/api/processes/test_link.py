"""Calls over a link: they arrive as they were made, and the buffers are bounded."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.patience import patience, until
from vsched.api.errors import ParameterRefused, SentError, received_error, sent_error
from vsched.api.processes.link import BEAT_S, SILENT_S, Link
from vsched.errors import RequestFailed, RequestRefused
from vsched.fork_server import IMPORT_S
from vsched.isolated.calls import ServerLostError
from vsched.media import ImageReference, MediaReference
from vsched.worker.contract import PixelBounds, VideoSampling

LIMIT_BYTES = 1 << 20


@pytest.mark.parametrize(
    "error",
    [
        RequestRefused("full. Remedy: wait.", code="queue_full", status=429, retry_after_s=1),
        RequestRefused("elsewhere", code="redirected", status=307, location="http://other"),
        ParameterRefused("`n` is out of bounds", param="n"),
        RequestFailed("stopping", code="stopping", status=503, retry_after_s=5),
        ServerLostError("lost", code="image_processing_failed"),
    ],
)
def test_link_carries_errors_with_all_their_fields(error: RequestRefused | RequestFailed) -> None:
    """Failures of isolated processes stay failures: a client would take a refusal for an error of its request."""
    frame = msgspec.msgpack.encode(sent_error(error))
    found = received_error(msgspec.msgpack.decode(frame, type=SentError))
    kind = RequestFailed if isinstance(error, ServerLostError) else type(error)
    assert (type(found), str(found), vars(found)) == (kind, str(error), vars(error))


def test_link_carries_every_form_of_an_image() -> None:
    references: list[ImageReference] = [
        "https://example.com/a.png",
        MediaReference("c2FmZQ==", is_embedded=True, attention=((0, 3), (5, 8))),
        MediaReference(uuid="a name", bounds=PixelBounds(28, 784)),
        MediaReference("data:video/mp4;base64,AA==", is_video=True, sampling=VideoSampling(2.0)),
        MediaReference(("data:one", "data:two"), is_video=True),
    ]
    frame = msgspec.msgpack.encode(references)
    assert msgspec.msgpack.decode(frame, type=list[ImageReference]) == references


class Side:
    """One end: the calls it received, and the reason for its loss."""

    def __init__(self) -> None:
        self.received: list[object] = []
        self.lost: list[str] = []
        self.error: Exception | None = None
        self.link = Link(self, on_lost=self.lost.append, waiting_bytes_max=LIMIT_BYTES)

    def on_note(self, number: int, content: str | list[int]) -> None:
        self.received.append((number, content))
        if self.error is not None:
            raise self.error


class Pair:
    """Two ends: `up` calls, `down` receives; `end` is a raw socket if `down` has not begun."""

    def __init__(self) -> None:
        self.up, self.down = Side(), Side()
        self.ours, self.end = socket.socketpair()

    async def open(self, *, both: bool = True) -> None:
        await self.up.link.open(self.ours)
        if both:
            await self.down.link.open(self.end)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    yield made
    for side in (made.up, made.down):
        side.link.close()
    made.ours.close()
    made.end.close()


async def test_link_frames_come_whole_however_they_are_cut(pair: Pair) -> None:
    await pair.down.link.open(pair.end)
    pair.ours.setblocking(False)
    frame = msgspec.msgpack.encode([("note", (1, "a")), ("note", (2, "bc"))])
    for byte in len(frame).to_bytes(8, "little") + frame:
        await asyncio.get_running_loop().sock_sendall(pair.ours, bytes([byte]))
        await asyncio.sleep(0)
    await until(lambda: len(pair.down.received) == 2)
    assert pair.down.received == [(1, "a"), (2, "bc")]


async def test_link_end_of_a_side_is_reported_to_the_other_once(pair: Pair) -> None:
    await pair.open()
    pair.up.link.close()
    await until(lambda: pair.down.lost)
    pair.down.link.drop_peer("again")
    assert pair.down.lost == ["has closed its link"]
    assert pair.up.lost == [], "the closing side gets no notice"


async def test_link_side_that_does_not_read_is_given_up_before_memory_is_full(pair: Pair) -> None:
    await pair.open(both=False)
    sent = 0
    while not pair.up.lost:
        pair.up.link.call("note", 1, "x" * 65536)
        sent += 65536
        assert sent < 4 * LIMIT_BYTES, "it is not bounded"
        await asyncio.sleep(0)
    assert "does not read" in pair.up.lost[0]
    pair.up.link.call("note", 1, "nobody hears this")


@pytest.mark.parametrize(
    "call", [("no",), ("note", "x", ""), ("note", 1, "")], ids=["a name", "a type", "what takes it"]
)
async def test_link_call_that_cannot_be_carried_out_ends_it(
    pair: Pair, call: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    await pair.open()
    pair.down.error = ValueError("a mistake")
    pair.up.link.call(*call)
    await until(lambda: pair.down.lost)
    assert pair.down.lost == ["made a call that could not be carried out"]
    assert "a call could not be carried out" in caplog.text


async def test_link_large_calls_go_one_after_the_other_as_they_are_read(pair: Pair) -> None:
    """The next one waits until the other side reads; small ones do not overtake earlier calls."""
    await pair.open(both=False)
    pair.up.link.call("note", 0, "")
    large = [
        asyncio.create_task(pair.up.link.call_large("note", n, "7" * 600_000)) for n in (1, 2, 3)
    ]
    for _ in range(20):
        await asyncio.sleep(0)
    assert [task.done() for task in large] == [True, False, False]
    assert not pair.up.lost
    await pair.down.link.open(pair.end)
    async with patience():
        await asyncio.gather(*large)
    await until(lambda: len(pair.down.received) == 4)
    assert [arguments[0] for arguments in pair.down.received] == [0, 1, 2, 3]  # type: ignore[index]


async def test_link_counts_no_suspended_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that was frozen for an hour: its peer was, too.

    Until its first data, a peer has the time of its imports, which take minutes on an overloaded machine.
    """
    await pair.open()
    link, now_s = pair.up.link, pair.up.link._loop.time()
    monkeypatch.setattr(link, "_loop", SimpleNamespace(time=lambda: now_s))

    def silent_after(beats: int) -> float:
        nonlocal now_s
        for _ in range(beats):
            now_s += BEAT_S
            silent_s = link.silent_s()
        return silent_s

    assert silent_after(int(IMPORT_S) - 1) < SILENT_S < silent_after(2)
    link.receive(msgspec.msgpack.encode([]))
    assert silent_after(30) == pytest.approx(30 * BEAT_S)
    now_s += 3600
    assert link.silent_s() < SILENT_S < silent_after(30)
    link.receive(msgspec.msgpack.encode([]))
    assert link.silent_s() == 0
