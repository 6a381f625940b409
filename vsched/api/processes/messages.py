"""What an API process and the engine tell each other."""

from __future__ import annotations

from typing import Any

import msgspec

from vsched.aio.streams.stream import TokenLogprob
from vsched.api.contract import ApiSettings
from vsched.api.metrics.reports import Report
from vsched.api.processes.link import WAITING_BYTES_MAX
from vsched.config import Config
from vsched.errors import RequestFailed, RequestRefused
from vsched.kernel.commands import Finish
from vsched.media import ImageReference
from vsched.media.base64_text import TextWithBase64
from vsched.media.embeddings import BoundedImage, EmbeddedImage, NamedImage
from vsched.record.left import Begun
from vsched.types import FinishReason, ModelInfo, Request
from vsched.wire import PromptPiece
from vsched.worker.capabilities import PixelBounds


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What an API process is told before anything else.

    Attributes:
        listener: The descriptor of the socket that it listens on.
        at_once: Whether it answers while it loads, with 503; one that was started anew leaves that to the others.
    """

    index: int
    config: Config
    settings: ApiSettings
    listener: int
    at_once: bool


def bodies_bytes(order: Order) -> int:
    """Return what may go up a link in one frame: the largest body, whose texts can take more than they did in JSON."""
    return 2 * order.settings.body_bytes_max + WAITING_BYTES_MAX


class SentText(msgspec.Struct, frozen=True):
    """A text; long base64 at its end stays bytes, from `start` on."""

    text: str
    start: int = -1
    base64: bytes = b""

    @classmethod
    def of(cls, text: str) -> SentText:
        """Take a text apart."""
        if isinstance(text, TextWithBase64):
            return cls(str(text), text.start, text.base64)
        return cls(text)

    @property
    def whole(self) -> str:
        """The text as it was."""
        if self.start < 0:
            return self.text
        return TextWithBase64.of(self.text, self.start, self.base64)


class SentImage(msgspec.Struct, frozen=True, kw_only=True):
    """An `ImageReference` on its way."""

    url: SentText | None = None
    embedding: SentText | None = None
    uuid: str | None = None
    bounds: PixelBounds | None = None

    @classmethod
    def of(cls, reference: ImageReference) -> SentImage:
        """Take a reference apart."""
        bounds = None
        if isinstance(reference, BoundedImage):
            bounds, reference = reference.bounds, reference.image
        match reference:
            case EmbeddedImage(data):
                return cls(embedding=SentText.of(data), bounds=bounds)
            case NamedImage(uuid, url):
                sent = None if url is None else SentText.of(url)
                return cls(url=sent, uuid=uuid, bounds=bounds)
        return cls(url=SentText.of(reference), bounds=bounds)

    @property
    def reference(self) -> ImageReference:
        """The reference as it was."""
        if self.embedding is not None:
            return EmbeddedImage(self.embedding.whole)
        url = None if self.url is None else self.url.whole
        image: str | NamedImage
        if self.uuid is not None:
            image = NamedImage(self.uuid, url)
        else:
            assert url is not None, "an image is something"
            image = url
        return image if self.bounds is None else BoundedImage(image, self.bounds)


class Arrive(msgspec.Struct, frozen=True, tag=True):
    """A request asks to come in; of `request` prompt and images follow in `Submit`, once it may.

    Its answers have the numbers from `number` on, which are the process's own. `begun` is as for
    `Engine.generate_answers`.
    """

    number: int
    request: Request
    request_ids: tuple[str, ...]
    images: int
    adapter: str
    begun: Begun | None = None


class Submit(msgspec.Struct, frozen=True, tag=True):
    """The tokens of the prompt of a request that may come in; those of its images are put in by the engine."""

    number: int
    token_ids: list[int]
    images: list[SentImage] = []


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits any more for a request that was not known to be accepted, for so many answers."""

    number: int
    answers: int


class End(msgspec.Struct, frozen=True, tag=True):
    """An answer is to end: a stop string was found, its client has left, or it cannot go on."""

    number: int
    reason: FinishReason


class Tokenize(msgspec.Struct, frozen=True, tag=True):
    """The tokens of images are to be put into those of a prompt."""

    number: int
    token_ids: list[int]
    images: list[SentImage]


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A whole HTTP request that only the engine can answer."""

    number: int
    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


class TakesRequests(msgspec.Struct, frozen=True, tag=True):
    """The process has loaded; `error` says why it never will."""

    error: str = ""


class Counted(msgspec.Struct, frozen=True, tag=True):
    """What the process has counted: told again and again as a sign of life, and when it is asked for."""

    report: Report


Up = Arrive | Submit | GiveUp | End | Tokenize | Ask | TakesRequests | Counted


class Refusal(msgspec.Struct, frozen=True):
    """What was asked for is refused: by a `RequestRefused`, or a `RequestFailed` where `failed`."""

    number: int
    message: str
    code: str
    status: int
    retry_after_s: int | None
    location: str
    failed: bool

    @classmethod
    def of(cls, number: int, error: Exception) -> Refusal:
        """Take an error apart; of one that is a mistake, nothing is told."""
        if not isinstance(error, RequestRefused | RequestFailed):
            error = RequestFailed("the server made a mistake")
        failed = isinstance(error, RequestFailed)
        location = error.location if isinstance(error, RequestRefused) else ""
        return cls(
            number, error.message, error.code, error.status, error.retry_after_s, location, failed
        )

    @property
    def error(self) -> RequestRefused | RequestFailed:
        """The error as it was."""
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
    """A request was accepted; its prompt is told where the engine prepared it."""

    number: int
    prompt_token_ids: list[int] | None


class HttpReply(msgspec.Struct, frozen=True):
    """The whole response to an `Ask`."""

    number: int
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Tokenized(msgspec.Struct, frozen=True):
    """What a prompt came to that was to be tokenized."""

    number: int
    token_ids: list[int]


class Served(msgspec.Struct, frozen=True):
    """What is served, once the engine knows it."""

    config: Config
    info: ModelInfo


class Facts(msgspec.Struct, frozen=True):
    """What an API process must know of the engine at any time."""

    state: str
    adapters: list[dict[str, Any]]


class Turn(msgspec.Struct, omit_defaults=True):
    """All that the engine has to tell a process after one turn of its loop, to be taken in this order.

    Attributes:
        numbers: Of the answer that each of `tokens` belongs to.
        logprobs: Those of tokens, by their index, where they were asked for.
        asks_report: Whether the process is to say what it has counted.
        stop: Whether it is to end; nothing comes after it.
    """

    served: Served | None = None
    facts: Facts | None = None
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
