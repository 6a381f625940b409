"""Messages survive encoding and decoding, and links keep their limits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tests.patience import patience, until
from vsched.api.processes.messages import (
    CancelRequest,
    End,
    Link,
    ProcessLoaded,
    ProcessMessage,
    Refusal,
    SentImage,
    Submit,
    framed,
    read_order,
)
from vsched.api.processes.process_main import ProcessOutbox
from vsched.errors import RequestFailed, RequestRefused
from vsched.media import ImageReference, MediaReference
from vsched.media.base64_text import TextWithBase64, base64_of
from vsched.media.references import as_reference
from vsched.types import FinishReason
from vsched.worker.contract import PixelBounds, VideoSampling

LONG = TextWithBase64.of("data:image/png;base64,stand-in", 22, b"iVBORw0KGgo=")
BOUNDS = PixelBounds(28, 784)


def sent(reference: ImageReference) -> MediaReference:
    frame = msgspec.msgpack.encode([Submit(1, [2, 3], [SentImage.of(reference)])])
    (submit,) = msgspec.msgpack.decode(frame, type=list[ProcessMessage])
    assert isinstance(submit, Submit)
    return submit.images[0].original


@pytest.mark.parametrize(
    "reference",
    [
        "https://example.com/a.png",
        MediaReference("c2FmZQ==", is_embedded=True),
        MediaReference("file:///a.safetensors", is_video=True, is_embedded=True),
        MediaReference(None, uuid="a name"),
        MediaReference(
            "data:video/mp4;base64,AA==", is_video=True, sampling=VideoSampling(2.0, bounds=BOUNDS)
        ),
        MediaReference(("data:one", LONG), is_video=True, sampling=VideoSampling(num_frames=4)),
        MediaReference("https://example.com/a.png", uuid="a name"),
        MediaReference("https://example.com/a.png", bounds=BOUNDS),
        MediaReference("c2FmZQ==", is_embedded=True, attention=((0, 3), (5, 8))),
        MediaReference("https://example.com/a.png", uuid="a name", bounds=BOUNDS),
    ],
    ids=[
        "url",
        "embedding",
        "embedded video",
        "name",
        "video",
        "frames",
        "named",
        "bounded",
        "spanned",
        "bounded and named",
    ],
)
def test_messages_bring_every_form_of_an_image(reference: ImageReference) -> None:
    assert sent(reference) == as_reference(reference)


@pytest.mark.parametrize("options", [{}, {"is_embedded": True}, {"uuid": "name"}])
def test_messages_bring_long_base64_as_bytes(options: dict[str, Any]) -> None:
    """It is kept apart from its text: as a text it would be copied under the GIL."""
    text = sent(MediaReference(LONG, **options)).source
    assert isinstance(text, TextWithBase64)
    assert (text, base64_of(text, 22)) == (LONG, LONG.base64)


@pytest.mark.parametrize(
    "error",
    [
        RequestRefused("full. Remedy: wait.", code="queue_full", status=429, retry_after_s=1),
        RequestRefused("elsewhere", code="redirected", status=307, location="http://other"),
        RequestFailed("stopping", code="stopping", status=503, retry_after_s=5),
    ],
)
def test_messages_carry_errors_with_all_fields_for_clients(
    error: RequestRefused | RequestFailed,
) -> None:
    frame = msgspec.msgpack.encode(Refusal.of(7, error))
    refusal = msgspec.msgpack.decode(frame, type=Refusal)
    assert refusal.number == 7
    assert type(refusal.error) is type(error)
    assert vars(refusal.error) == vars(error)


def test_messages_report_nothing_of_a_mistake() -> None:
    error = Refusal.of(7, KeyError("/secret/path")).error
    assert isinstance(error, RequestFailed)
    assert error.message == "the server made a mistake"


LIMIT_BYTES = 1 << 20


class Side:
    """One end: the messages it received, and the reason for its loss."""

    def __init__(self, kind: object, **limits: int) -> None:
        self.received: list[object] = []
        self.lost: list[str] = []
        self.error: Exception | None = None
        self.link = Link(kind, self._take, self.lost.append, **limits)

    def _take(self, content: object) -> None:
        self.received.append(content)
        if self.error is not None:
            raise self.error


class Pair:
    """Two ends: `up` sends, `down` receives; `end` is a raw socket if `down` has not begun."""

    def __init__(self) -> None:
        self.up = Side(object, waiting_bytes_max=LIMIT_BYTES)
        self.down = Side(list[ProcessMessage], frame_bytes_max=LIMIT_BYTES)
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
    made.end.close()


async def test_link_brings_messages_as_they_were_sent(pair: Pair) -> None:
    sent = [End(3, FinishReason.STOP), CancelRequest(4, 2), Submit(5, list(range(50_000)))]
    await pair.open()
    for message in sent:
        pair.up.link.send([message])
    await until(lambda: len(pair.down.received) == len(sent))
    assert pair.down.received == [[message] for message in sent]


async def test_link_frames_come_whole_however_they_are_cut(pair: Pair) -> None:
    await pair.down.link.open(pair.end)
    loop = asyncio.get_running_loop()
    pair.ours.setblocking(False)
    import msgspec

    frames = b"".join(framed(msgspec.msgpack.encode([ProcessLoaded(word)])) for word in ("a", "bc"))
    for at in range(len(frames)):
        await loop.sock_sendall(pair.ours, frames[at : at + 1])
        await asyncio.sleep(0)
    await until(lambda: len(pair.down.received) == 2)
    assert pair.down.received == [[ProcessLoaded("a")], [ProcessLoaded("bc")]]
    pair.ours.close()


async def test_link_end_of_a_side_is_told_to_the_other_once(pair: Pair) -> None:
    await pair.open()
    pair.up.link.close()
    await until(lambda: pair.down.lost)
    pair.down.link.lose("again")
    assert pair.down.lost == ["has closed its link"]
    assert pair.up.lost == [], "the closing side gets no notice"


async def test_link_side_that_does_not_read_is_given_up_before_memory_is_full(pair: Pair) -> None:
    await pair.open(both=False)
    sent = 0
    while not pair.up.lost:
        pair.up.link.send(b"x" * 65536)
        sent += 65536
        assert sent < 4 * LIMIT_BYTES, "it is not bounded"
        await asyncio.sleep(0)
    assert "does not read" in pair.up.lost[0]
    pair.up.link.send(b"nobody hears this")


async def test_link_frame_over_the_limit_is_never_held(pair: Pair) -> None:
    await pair.down.link.open(pair.end)
    pair.ours.sendall((LIMIT_BYTES + 1).to_bytes(4, "little") + b"x")
    await until(lambda: pair.down.lost)
    assert pair.down.lost == [f"sent a frame of {LIMIT_BYTES + 1} bytes, limit {LIMIT_BYTES}"]
    pair.ours.close()


@pytest.mark.parametrize("spoilt", ["what is sent", "what takes it"])
async def test_link_message_that_cannot_be_taken_ends_it(
    pair: Pair, spoilt: str, caplog: pytest.LogCaptureFixture
) -> None:
    await pair.open()
    if spoilt == "what takes it":
        pair.down.error = ValueError("a mistake")
    pair.up.link.send("no message" if spoilt == "what is sent" else [ProcessLoaded()])
    await until(lambda: pair.down.lost)
    assert pair.down.lost == ["sent what could not be taken"]
    assert "a message could not be taken" in caplog.text


async def test_link_large_messages_go_one_after_the_other_as_they_are_read(pair: Pair) -> None:
    """The next one waits until the other side reads; small ones do not overtake earlier messages."""
    box = ProcessOutbox(pair.up.link)
    await pair.open(both=False)
    box.put(CancelRequest(0, 1))
    large = [asyncio.create_task(box.put_large(Submit(n, [7] * 600_000))) for n in (1, 2, 3)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert [task.done() for task in large] == [True, False, False]
    assert not pair.up.lost
    await pair.down.link.open(pair.end)
    async with patience():
        await asyncio.gather(*large)
    await until(lambda: len(pair.down.received) == 4)
    received = [message for messages in pair.down.received for message in messages]  # type: ignore[attr-defined]
    assert [message.number for message in received] == [0, 1, 2, 3]


async def test_link_order_is_read_before_there_is_a_loop(pair: Pair) -> None:
    pair.ours.sendall(framed(b"order") + framed(b"first frame"))
    assert read_order(pair.end) == b"order"
    pair.ours.sendall(b"\1")
    pair.ours.close()
    assert read_order(pair.end) == b"first frame"
    with pytest.raises(EOFError, match="the engine is gone"):
        read_order(pair.end)
