"""A connection whose client can hold nothing for long: uvicorn's protocol, with the limits that it has not.

Uvicorn bounds neither the head of a request nor the time that a request takes to arrive, and waits for ever for a
client to read what was written. All three are judged here, by bytes and on the loop's clock, since an application
sees a request when its head is complete, and writes without being told where the bytes are.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from vsched.api.errors import envelope
from vsched.config.sections import ServerConfig
from vsched.errors import RequestRefused, limit_message


class BoundedProtocol(HttpToolsProtocol):
    """One connection; `limits` are those of the configuration.

    A head over its limits is answered 431, and a request that does not arrive in time 408. A client that leaves a full
    connection unread has it cut off: the application learns of a disconnect, as of any other.
    """

    def __init__(self, *args: Any, limits: ServerConfig, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._head_bytes = 0
        self._head_size = 0
        self._in_head = self._in_body = self._is_head = False
        self._refusal: RequestRefused | None = None
        self._arrival: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None

    # --- a request arrives ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; who connects is to send a request."""
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """End; nothing is due any more."""
        super().connection_lost(exc)
        self._request_came()
        self._client_read()

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless a head grows beyond its limit, header by header or in one that does not end."""
        if self._arrival is None:
            self._expect_request()
        self._is_head = not self._in_body
        super().data_received(data)
        if self.transport.is_closing() or not (self._in_head and self._is_head):
            return  # the head is complete, or only a part of this belongs to it: headers are counted one by one
        self._head_bytes += len(data)
        if self._head_bytes > self._limits.header_bytes_max:
            self._refuse(self._head_too_large())

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head, self._head_bytes, self._head_size = True, 0, 0

    def on_url(self, url: bytes) -> None:
        """Count the URL."""
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, or a trailer, which is one too.

        Raises:
            RequestRefused: Which the parser passes on as an error of its own.
        """
        super().on_header(name, value)
        count, limit = len(self.headers), self._limits.headers_max
        if count > limit:
            self._refusal = _head_refused("headers", count, limit, "server.headers_max")
            raise self._refusal
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        """The head is there."""
        self._in_head, self._in_body = False, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is there."""
        self._request_came()
        self._in_body = self._is_head = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Tell what is wrong with a request that does not reach the application."""
        error = self._refusal or RequestRefused(
            f"this is not HTTP ({msg.rstrip('.')}). Remedy: send HTTP/1.1.", code="invalid_http"
        )
        self._refuse(error)

    def _count(self, size: int) -> None:
        self._head_size += size
        if self._head_size > self._limits.header_bytes_max:
            self._refusal = self._head_too_large()
            raise self._refusal

    def _head_too_large(self) -> RequestRefused:
        limit, value = self._limits.header_bytes_max, max(self._head_bytes, self._head_size)
        what = "bytes in URL and headers"
        return _head_refused(what, f"at least {value}", limit, "server.header_bytes_max")

    def _expect_request(self) -> None:
        limit_s = self._limits.receive_s
        self._arrival = self.loop.call_later(limit_s, self._on_late_request)

    def _request_came(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _on_late_request(self) -> None:
        self._arrival = None
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and not self.cycle.more_body:
            self._expect_request()  # a pipelined one, which the answer to the last one holds up
        elif answering or self._in_head:
            limit = f"{self._limits.receive_s:g} s"
            message = limit_message(
                "the request did not arrive in time",
                value=f"over {limit}",
                limit=limit,
                remedy="send it faster, or raise server.receive_s",
            )
            self._refuse(RequestRefused(message, code="request_timeout", status=408))
        else:
            self._close()  # nothing came, or the rest of what was answered did not

    def _refuse(self, error: RequestRefused) -> None:
        """Answer in place of the application, and close; in the midst of its answer, just end that."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.abort()
                return
        body = msgspec.json.encode(envelope(error))
        head = (
            STATUS_LINE[error.status],
            b"content-type: application/json\r\n",
            b"content-length: %d\r\n" % len(body),
            b"x-request-id: %s\r\n" % secrets.token_hex(16).encode(),
            b"connection: close\r\n\r\n",
        )
        self.transport.write(b"".join((*head, body)))
        self._close()

    # --- a client reads ---

    def pause_writing(self) -> None:
        """The connection is full: the client is to read."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """The client has read; of a connection that closes, it is to read the rest."""
        self._client_read()
        super().resume_writing()
        self._expect_rest()

    def on_response_complete(self) -> None:
        """The answer is written, which is not to say that it is read."""
        super().on_response_complete()
        self._expect_rest()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came after the last answer."""
        super().timeout_keep_alive_handler()
        self._expect_rest()

    def _close(self) -> None:
        self.transport.close()
        self._expect_rest()

    def _expect_rest(self) -> None:
        # A transport that closes waits for what was written to leave, however long that takes.
        if self.transport.is_closing():
            self._expect_reading()

    def _expect_reading(self) -> None:
        if self._reading is None:
            self._reading = self.loop.call_later(self._limits.send_s, self.transport.abort)

    def _client_read(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None


def _head_refused(what: str, value: object, limit: object, setting: str) -> RequestRefused:
    message = limit_message(
        f"too many {what}", value=value, limit=limit, remedy=f"send fewer, or raise {setting}"
    )
    return RequestRefused(message, code="headers_too_large", status=431)
