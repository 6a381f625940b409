"""A streaming OpenAI client with low overhead: one connection per request, httptools, one decode per event.

A connection is not reused, because servers drop idle ones at arbitrary times, which would make
requests fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from vsched.errors import ConfigError, VschedError

_READ_BYTES = 256 * 1024
_ERROR_CHARACTERS_MAX = 300
_READY_POLL_S = 0.5
UNREADABLE = (OSError, VschedError, msgspec.MsgspecError, httptools.HttpParserError)
"""Errors of a connection, or of a response that is none of an OpenAI-compatible server."""


class BenchError(VschedError):
    """The server did not respond as required."""


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(slots=True)
class Sample:
    """One request as seen by the client; times in seconds on one clock.

    `stamps` are the arrival times of text, or of tokens if the request has `return_token_ids`; those arriving together
    have one stamp.
    """

    started: float
    ended: float = 0.0
    stamps: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    status: int | None = None
    error: str | None = None

    @property
    def text(self) -> str:
        """The output text."""
        return "".join(self.pieces)


class _ResponseBody:
    """Callbacks of httptools: the body as it arrives, and its end."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.done = False

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.done = True


def chat_body(
    model: str, messages: Sequence[dict[str, Any]], tokens: int, extra: Mapping[str, Any]
) -> bytes:
    """Return the body of a greedy, streaming chat request for at most `tokens`, with `extra` fields."""
    content: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }
    return msgspec.json.encode(content)


class BenchClient:
    """Client of one server.

    Attributes:
        on_text: Called with the sample of a request when text of it has arrived.
    """

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = 600.0) -> None:
        self.on_text: Callable[[Sample], None] | None = None
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:  # an impossible port, or half an IPv6 address
            host = None
        if not host or parts.scheme not in {"http", "https"}:
            raise ConfigError("url: not an http(s) URL. Remedy: give http://host:port.")
        self._host = host
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._secure = ssl.create_default_context() if parts.scheme == "https" else None
        self._timeout_s = timeout_s
        self._headers = f"Host: {parts.netloc}\r\nConnection: close\r\nAccept: */*\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"
        self._decoder = msgspec.json.Decoder(_Event)

    async def model(self) -> str:
        """Return the name of the first model that the server lists.

        Raises:
            BenchError: When the server does not respond or lists none.
        """
        response = _ResponseBody()
        try:
            async with asyncio.timeout(self._timeout_s):
                status = await self._exchange("GET", "/v1/models", b"", response, None)
            if status == 200:
                return msgspec.json.decode(bytes(response.body), type=_Models).data[0].id
        except (*UNREADABLE, IndexError) as error:
            message = "the server lists no model. Remedy: check --url, or give --model."
            raise BenchError(message) from error
        message = f"the server answered {status} to /v1/models. Remedy: check --url and --api-key."
        raise BenchError(message)

    async def chat(self, body: bytes) -> Sample:
        """Send one streaming chat request; failures are recorded in the sample."""
        sample = Sample(started=time.perf_counter())
        response = _ResponseBody()
        try:
            async with asyncio.timeout(self._timeout_s):
                status = await self._exchange(
                    "POST", "/v1/chat/completions", body, response, sample
                )
            sample.status = status
            if status != 200:
                text = bytes(response.body).decode("utf-8", "replace")
                sample.error = f"status {status}: {text[:_ERROR_CHARACTERS_MAX]}"
        except TimeoutError:
            sample.error = f"no answer within {self._timeout_s:g} s"
        except UNREADABLE as error:
            sample.error = f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS_MAX]
        sample.ended = time.perf_counter()
        return sample

    async def chat_when_ready(self, body: bytes) -> Sample:
        """Send a chat request, and repeat it while the server responds with 503, as during loading.

        Blocks: up to the client's timeout, plus the request itself.
        """
        deadline = time.perf_counter() + self._timeout_s
        while True:
            sample = await self.chat(body)
            if sample.status != 503 or time.perf_counter() > deadline:
                return sample
            await asyncio.sleep(_READY_POLL_S)

    async def _exchange(
        self, method: str, path: str, body: bytes, response: _ResponseBody, sample: Sample | None
    ) -> int:
        reader, writer = await asyncio.open_connection(
            self._host, self._port, ssl=self._secure, limit=_READ_BYTES
        )
        try:
            head = (
                f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            writer.writelines((head.encode("latin-1"), body))
            parser = httptools.HttpResponseParser(response)
            while not response.done:
                data = await reader.read(_READ_BYTES)
                if not data:
                    break
                parser.feed_data(data)
                if sample is not None and parser.get_status_code() == 200:
                    self._take_events(response.body, sample)
            if not response.done:
                raise BenchError("the server closed the connection before the end")
            return int(parser.get_status_code())
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                writer.transport.abort()

    def _take_events(self, body: bytearray, sample: Sample) -> None:
        """Process the complete lines in `body`; the rest is the start of the next line."""
        end = body.rfind(b"\n") + 1
        if end == 0:
            return
        now = time.perf_counter()
        lines = bytes(body[:end]).splitlines()
        del body[:end]
        for line in lines:
            if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
                continue
            event = self._decoder.decode(line[5:])
            if event.error is not None:
                raise BenchError(msgspec.json.encode(event.error).decode())
            if event.usage is not None:
                sample.prompt_tokens = event.usage.prompt_tokens
                sample.output_tokens = event.usage.completion_tokens
            for choice in event.choices:
                text = (choice.delta and choice.delta.content) or ""
                if text or choice.token_ids:
                    sample.stamps.append(now)
                    sample.pieces.append(text)
                    if self.on_text is not None:
                        self.on_text(sample)
