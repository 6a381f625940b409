"""Messages between an API process and the engine.

A link between two processes over a socket pair; one frame carries all messages of an event loop iteration.

When a process ends, in whatever manner, its link closes, and the other side notices at once. Sending never waits;
senders of large messages wait for `writable` first. Buffered data is limited on both sides: a peer that does not read
is dropped once too many bytes wait for it, and so is a peer that sends too large a frame.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
from collections.abc import Callable
from typing import Any, cast

import msgspec

from vsched.aio.streams import TokenLogprob
from vsched.api.contract import ApiSettings
from vsched.api.metrics import Report
from vsched.config import Config
from vsched.errors import RequestFailed, RequestRefused
from vsched.kernel.commands import Finish
from vsched.media import ImageReference, MediaReference
from vsched.media.base64_text import TextWithBase64
from vsched.media.references import as_reference
from vsched.record.journal import PartialOutput
from vsched.types import FinishReason, ModelInfo, Request
from vsched.wire import PromptPiece

logger = logging.getLogger(__name__)
WAITING_BYTES_MAX = 64 << 20
"""Maximum bytes that may wait to be read by the peer, in addition to request bodies."""
BEAT_S = 1.0
"""Interval at which each side sends at least a sign of life."""
SILENT_S = 60.0
"""A peer that has sent nothing for this time is dropped: its event loop hangs, or it is stopped."""
ORDER_BYTES_MAX = 16 << 20
_SIZE_BYTES = 4
_encoder = msgspec.msgpack.Encoder()


class Link(asyncio.Protocol):
    """One end; `take` gets each frame, decoded as `kind`, and `on_lost` is called once, with the reason."""

    def __init__(
        self,
        kind: Any,
        take: Callable[[Any], None],
        on_lost: Callable[[str], None],
        *,
        frame_bytes_max: int = WAITING_BYTES_MAX,
        waiting_bytes_max: int = WAITING_BYTES_MAX,
    ) -> None:
        """Create an end, to be started by `open`, with limits for a received frame and for unsent data."""
        self._frame_bytes_max = frame_bytes_max
        self._waiting_bytes_max = waiting_bytes_max
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._take = take
        self._on_lost = on_lost
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self.lost = False
        self._received_s = asyncio.get_running_loop().time()

    async def open(self, end: socket.socket) -> None:
        """Start on one socket of a pair."""
        end.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass of it

    def send(self, content: object) -> None:
        """Send a frame; on a lost link it is dropped."""
        transport = self._transport
        if self.lost or transport is None:
            return
        frame = framed(_encoder.encode(content))
        transport.write(frame)
        waiting = transport.get_write_buffer_size()
        if waiting > self._waiting_bytes_max:
            self.lose(f"does not read: {waiting} bytes wait, limit {self._waiting_bytes_max}")

    async def writable(self) -> None:
        """Wait until little data is unsent.

        Blocks: until the peer reads, or the link is lost.
        """
        await self._writable.wait()

    def data_received(self, data: bytes) -> None:
        """Handle the complete frames."""
        self._received_s = asyncio.get_running_loop().time()
        received = self._received
        received += data
        at = 0
        while len(received) - at >= _SIZE_BYTES:
            start = at + _SIZE_BYTES
            size = int.from_bytes(received[at:start], "little")
            if size > self._frame_bytes_max:
                self.lose(f"sent a frame of {size} bytes, limit {self._frame_bytes_max}")
            if self.lost:
                return
            end = start + size
            if len(received) < end:
                break
            try:
                with memoryview(received) as view, view[start:end] as body:
                    content = self._decoder.decode(body)
                self._take(content)
            except Exception:
                logger.exception("a message could not be taken")
                self.lose("sent what could not be taken")
                return
            at = end
        del received[:at]

    def silent_s(self) -> float:
        """Time since the last data from the peer."""
        return asyncio.get_running_loop().time() - self._received_s

    def pause_writing(self) -> None:
        """Clear `writable`."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Set `writable`."""
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        """Report the loss of the peer."""
        self.lose(str(error or "has closed its link"))

    def lose(self, why: str) -> None:
        """Drop the peer; idempotent."""
        if self.lost:
            return
        self.lost = True
        self._writable.set()
        if self._transport is not None:
            self._transport.abort()
        self._on_lost(why)

    def close(self) -> None:
        """Send unsent data and close, without calling `on_lost`."""
        self.lost = True
        self._writable.set()
        if self._transport is not None:
            self._transport.close()


def framed(body: bytes) -> bytes:
    """Add the frame header."""
    return len(body).to_bytes(_SIZE_BYTES, "little") + body


def read_order(end: socket.socket) -> bytes:
    """Read the first frame of a link.

    Blocks: until the peer has sent it, or is gone.

    Raises:
        EOFError: If the peer is gone.
    """
    size = int.from_bytes(_read(end, _SIZE_BYTES), "little")
    assert size <= ORDER_BYTES_MAX, "an order is small"
    return _read(end, size)


def _read(end: socket.socket, size: int) -> bytes:
    body = end.recv(size, socket.MSG_WAITALL)
    if len(body) < size:
        raise EOFError("the engine is gone")
    return body


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """First message to an API process.

    Attributes:
        listener: Descriptor of the socket that it listens on.
        at_once: Answer with 503 while loading; a restarted process leaves new connections to the others instead.
    """

    index: int
    config: Config
    settings: ApiSettings
    listener: int
    at_once: bool


def bodies_bytes(order: Order) -> int:
    """Limit of a frame to the engine: the largest body, whose texts may be longer than in JSON."""
    return 2 * order.settings.body_bytes_max + WAITING_BYTES_MAX


class SentText(msgspec.Struct, frozen=True):
    """A text; long base64 at its end, from `start` on, stays bytes."""

    text: str
    start: int = -1
    base64: bytes = b""

    @classmethod
    def of(cls, text: str) -> SentText:
        """Convert a text."""
        if isinstance(text, TextWithBase64):
            return cls(str(text), text.start, text.base64)
        return cls(text)

    @property
    def original(self) -> str:
        """The original text."""
        if self.start < 0:
            return self.text
        return TextWithBase64.of(self.text, self.start, self.base64)


class SentImage(msgspec.Struct, frozen=True):
    """Serializable form of a `MediaReference`, with its sources apart; one alone is not a frame of a list."""

    reference: MediaReference
    sources: list[SentText]
    is_list: bool

    @classmethod
    def of(cls, image: ImageReference) -> SentImage:
        """Convert a reference."""
        reference = as_reference(image)
        sources = [*map(SentText.of, reference.sources)]
        is_list = isinstance(reference.source, tuple)
        return cls(dataclasses.replace(reference, source=None), sources, is_list)

    @property
    def original(self) -> MediaReference:
        """The original reference."""
        sources = tuple(each.original for each in self.sources)
        source = sources if self.is_list else next(iter(sources), None)
        return dataclasses.replace(self.reference, source=source)


class AdmitRequest(msgspec.Struct, frozen=True, tag=True):
    """A request asks for admission; after it, `Submit` carries its prompt and images.

    Its choices are numbered from `number` on, by the process. `started` is as in `Engine.generate_choices`.
    """

    number: int
    request: Request
    request_ids: tuple[str, ...]
    images: int
    adapter: str
    started: PartialOutput | None = None


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Prompt tokens of an admitted request; the engine expands those of its images."""

    number: int
    token_ids: list[int]
    images: list[SentImage] = []


class CancelRequest(msgspec.Struct, frozen=True, tag=True):
    """Cancel a request with this number of choices whose acceptance is not known."""

    number: int
    choices: int


class End(msgspec.Struct, frozen=True, tag=True):
    """End a choice: a stop string was found, its client disconnected, or detokenization failed."""

    number: int
    reason: FinishReason


class Tokenize(msgspec.Struct, frozen=True, tag=True):
    """Expand the image tokens of a prompt."""

    number: int
    token_ids: list[int]
    images: list[SentImage]


class HttpForward(msgspec.Struct, frozen=True, tag=True):
    """A complete HTTP request that only the engine can answer."""

    number: int
    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


class ProcessLoaded(msgspec.Struct, frozen=True, tag=True):
    """The process has loaded; `error` is the reason that it cannot serve."""

    error: str = ""


class MetricsReport(msgspec.Struct, frozen=True, tag=True):
    """Metrics of the process: sent regularly as a sign of life, and on request."""

    report: Report


ProcessMessage = (
    AdmitRequest
    | Submit
    | CancelRequest
    | End
    | Tokenize
    | HttpForward
    | ProcessLoaded
    | MetricsReport
)


class Refusal(msgspec.Struct, frozen=True):
    """An error: a `RequestFailed` if `failed` is set, otherwise a `RequestRefused`."""

    number: int
    message: str
    code: str
    status: int
    retry_after_s: int | None
    location: str
    failed: bool

    @classmethod
    def of(cls, number: int, error: Exception) -> Refusal:
        """Convert an error; details of unexpected exceptions are left out."""
        if not isinstance(error, RequestRefused | RequestFailed):
            error = RequestFailed("the server made a mistake")
        failed = isinstance(error, RequestFailed)
        location = error.location if isinstance(error, RequestRefused) else ""
        return cls(
            number, error.message, error.code, error.status, error.retry_after_s, location, failed
        )

    @property
    def error(self) -> RequestRefused | RequestFailed:
        """The original error."""
        if self.failed:
            return RequestFailed(
                self.message,
                code=self.code,
                status=self.status,
                retry_after_s=self.retry_after_s,
            )
        return RequestRefused(
            self.message,
            code=self.code,
            status=self.status,
            retry_after_s=self.retry_after_s,
            location=self.location,
        )


class AcceptedRequest(msgspec.Struct, frozen=True):
    """A request was accepted; its prompt is included if the engine prepared it."""

    number: int
    prompt_token_ids: list[int] | None


class HttpReply(msgspec.Struct, frozen=True):
    """The complete response to an `HttpForward`."""

    number: int
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Tokenized(msgspec.Struct, frozen=True):
    """The result of a `Tokenize`."""

    number: int
    token_ids: list[int]


class Served(msgspec.Struct, frozen=True):
    """The served model and configuration, once the engine has loaded them."""

    config: Config
    info: ModelInfo


class EngineStatus(msgspec.Struct, frozen=True):
    """Current state of the engine."""

    state: str
    adapters: list[dict[str, Any]]


class EngineMessages(msgspec.Struct, omit_defaults=True):
    """All messages of one event loop iteration from the engine to a process, to be handled in this order.

    Attributes:
        numbers: Number of the choice of each entry in `tokens`.
        logprobs: Log-probabilities by index in `tokens`, if requested.
        asks_report: The process shall send its metrics.
        stop: The process shall end; it is the last message.
    """

    served: Served | None = None
    status_update: EngineStatus | None = None
    entered: list[int] = []
    accepted: list[AcceptedRequest] = []
    refused: list[Refusal] = []
    replies: list[HttpReply] = []
    tokenized: list[Tokenized] = []
    prompts: list[PromptPiece] = []
    numbers: list[int] = []
    tokens: list[int] = []
    logprobs: dict[int, TokenLogprob] = {}
    finished: list[Finish] = []
    asks_report: bool = False
    stop: bool = False
