"""Uvicorn within the configured limits, and process-wide tuning for server processes.

Uvicorn limits neither the size of a request's head nor its arrival time, and waits forever for a client to read a
response. All three are limited here, because an application sees a request only after its head is complete, and cannot
see whether its response is read. Violations of HTTP are fixed: an `Upgrade` header is ignored (RFC 9110, 7.8),
responses to HTTP/1.0 are not chunked (RFC 9112, 6.1), HTTP/1.1 requires exactly one `Host` header (RFC 9112, 3.2), and
a client may half-close its connection and still read the response (RFC 9112, 9.6).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import os
import resource
import secrets
import socket
import sys
from collections.abc import Awaitable, Iterator
from functools import partial
from typing import Any, cast

import httptools
import msgspec
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from vsched.api.errors import envelope
from vsched.api.middleware import log_access, note_refusal
from vsched.config import Config
from vsched.config.sections import ServerConfig
from vsched.errors import ConfigError, RequestRefused, limit_message
from vsched.worker.registry import load_worker

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b"3\r\n:\n\n\r\n"
"""A chunk with a comment of a stream of events, which clients ignore."""
_FIRST_PROBE_S = 0.05
_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 8 << 20
"""Memory blocks of this size get a mapping of their own."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection, with the limits of the configuration.

    A head over its limits gets a 431, and a request that does not arrive in time a 408. A client that does not read its
    response is disconnected: to the application it looks like any other disconnect.
    """

    def __init__(self, *args: Any, limits: ServerConfig, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._head_bytes = 0
        self._head_size = 0
        self._in_head = self._in_body = self._is_head = False
        self._refusal: RequestRefused | None = None
        self._started_s = 0.0
        self._arrival: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._answered: RequestResponseCycle | None = None
        """The request in progress; `cycle` is the last received one, perhaps pipelined."""
        self._ends_with_body = False

    # --- requests ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request of a new connection."""
        super().connection_made(transport)
        self._started_s = self.loop.time()
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers, and mark the request in progress as disconnected."""
        super().connection_lost(exc)
        if self._answered is not None:
            self._answered.disconnected = True
            self._answered.message_event.set()
        self._request_came()
        self._client_read()

    def data_received(self, data: bytes) -> None:
        """Parse data; refuse a head above its limit, counted per header and, for an incomplete one, in total."""
        if self._arrival is None:
            self._expect_request()
        self._is_head = not self._in_body
        self._unset_keepalive_if_required()
        self._parse(data)
        if self.transport.is_closing() or not (self._in_head and self._is_head):
            return  # the head is complete, or began earlier: headers are counted singly
        self._head_bytes += len(data)
        if self._head_bytes > self._limits.header_bytes_max:
            self._refuse(self._head_too_large())

    def _parse(self, data: bytes) -> None:
        """Feed the parser; if it stops at an `Upgrade` header, parse the request again without that header."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            except httptools.HttpParserError as error:
                self.send_400_response(str(error))
                return
            else:
                return

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [
            b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version),
            *(b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"),
        ]
        return b"\r\n".join((*lines, b"", b""))

    def on_message_begin(self) -> None:
        """Reset the counters for a new request."""
        super().on_message_begin()
        self._started_s = self.loop.time()
        self._in_head, self._head_bytes, self._head_size = True, 0, 0

    def on_url(self, url: bytes) -> None:
        """Count the bytes of the URL."""
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header or trailer; a trailer is dropped, since headers decide about access.

        Raises:
            RequestRefused: Passed on by the parser as an error of its own.
        """
        if not self._in_body:
            super().on_header(name, value)
        count, limit = len(self.headers), self._limits.headers_max
        if count > limit:
            self._refusal = _head_refused("headers", count, limit, "server.headers_max")
            raise self._refusal
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        """Serve the request, unless it will be parsed again without its `Upgrade` header.

        Raises:
            RequestRefused: Passed on by the parser as an error of its own.
        """
        old = self.parser.get_http_version() != "1.1"
        self._refusal = self._head_invalid(hosts_min=0 if old else 1) or self._too_many()
        if self._refusal is not None:
            raise self._refusal
        if self.parser.should_upgrade():
            return
        self._in_head, self._in_body = False, True
        self.expect_100_continue = self.expect_100_continue and not old
        super().on_headers_complete()
        self.cycle.transport = _ResponseTransport(self)  # type: ignore[assignment]
        if not self.pipeline:
            self._answered = self.cycle
        if old:
            _end_by_closing(self.cycle)

    def _head_invalid(self, *, hosts_min: int) -> RequestRefused | None:
        if self.parser.get_method() == b"CONNECT":
            message = (
                "CONNECT is not supported: this server is not a proxy. "
                "Remedy: send the request itself."
            )
            return RequestRefused(message, code="method_not_implemented", status=501)
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if any(coding.strip().lower() != b"chunked" for coding in codings):
            message = limit_message(
                "the transfer coding is not supported",
                value=f"Transfer-Encoding {b', '.join(codings).decode('latin-1')[:100]}",
                limit="chunked",
                remedy="send the body uncompressed, in chunks or with a Content-Length",
            )
            return RequestRefused(message, code="transfer_coding_not_implemented", status=501)
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts_min <= hosts <= 1:
            return None
        message = limit_message(
            "a request must have one Host header",
            value=f"{hosts} Host headers",
            limit="1 Host header",
            remedy="send one Host header, which HTTP/1.1 requires",
        )
        return RequestRefused(message, code="invalid_host")

    def _too_many(self) -> RequestRefused | None:
        """Error for a request while too many connections are open; one that is being answered goes on."""
        count, limit = max(len(self.connections), len(self.tasks)), self._limits.max_connections
        is_answering = self._answered is not None and not self._answered.response_complete
        if count <= limit or is_answering:
            return None
        return RequestRefused.of_limit(
            "too many connections are open",
            value=count,
            limit=limit,
            remedy="try again later, close idle connections, or raise server.max_connections",
            code="connections_full",
            status=503,
        )

    def on_message_complete(self) -> None:
        """Finish the body of the request."""
        if self.parser.should_upgrade():
            return
        self._request_came()
        self._in_body = self._is_head = False
        super().on_message_complete()
        if self._ends_with_body:
            self._close()

    def send_400_response(self, msg: str) -> None:
        """Send the error for a request that does not reach the application."""
        error = self._refusal or RequestRefused(
            f"this is not valid HTTP ({msg}). Remedy: send HTTP/1.1, without TLS or HTTP/2.",
            code="invalid_http",
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
        if self.pipeline or (answering and not self.cycle.more_body):
            self._expect_request()  # a pipelined request, delayed by the current response
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
            self._close()  # no request, or the rest of one that was already answered, arrived

    def _refuse(self, error: RequestRefused) -> None:
        """Send an error instead of the application, and close; if a response has started, only abort it."""
        cycle = self._answered
        request_id = secrets.token_hex(16)
        if cycle is None or cycle.response_complete:
            self._log_refusal(error.status, request_id)
        else:  # the application logs it
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.abort()
                return
            note_refusal(cycle.scope, error.status, request_id)
        body = msgspec.json.encode(envelope(error))
        head = (
            STATUS_LINE[error.status],
            b"content-type: application/json\r\n",
            b"content-length: %d\r\n" % len(body),
            b"x-request-id: %s\r\n" % request_id.encode(),
            b"connection: close\r\n\r\n",
        )
        self.transport.write(b"".join((*head, body)))
        self._close()

    def _log_refusal(self, status: int, request_id: str) -> None:
        """Write the line of a request that does not reach the application into the access log."""
        if not self._limits.access_log:
            return
        scope: Scope = {"type": "http", "client": self.client}
        if self.url and (self._in_head or self._in_body):
            path = self.url.partition(b"?")[0].decode("latin-1")
            scope.update(method=self.parser.get_method().decode("ascii"), path=path)
        log_access(scope, status, request_id, (self.loop.time() - self._started_s) * 1e3)

    # --- half-closed and closed connections ---

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for a complete request; answer 400 to an incomplete one; else close."""
        cycle = self.cycle
        is_answering = cycle is not None and not cycle.response_complete
        if is_answering and not cycle.more_body:
            cycle.keep_alive = cycle.waiting_for_100_continue = False
            if self._answered is not None and self.parser.get_http_version() == "1.1":
                self._probe(self._answered)
            return True
        if is_answering or self._in_head:
            message = (
                "the connection was closed before the request was complete. "
                "Remedy: send the whole body, of the length in Content-Length."
            )
            self._refuse(RequestRefused(message, code="request_incomplete"))
        return False

    def _probe(self, cycle: RequestResponseCycle, pause_s: float = _FIRST_PROBE_S) -> None:
        """Find out whether the client has closed the connection or only half-closed it.

        Both look the same until data is sent: after a close, the first write is answered with a reset, and the next
        write fails. So interim responses are sent at growing intervals, and comments once a stream has started.
        """
        if not (cycle.disconnected or cycle.response_complete):
            if not cycle.response_started:
                self.transport.write(_CONTINUE)
            elif cycle.chunked_encoding:
                self.transport.write(_COMMENT)
            self.loop.call_later(pause_s, self._probe, cycle, 2 * pause_s)

    # --- clients that do not read ---

    def pause_writing(self) -> None:
        """Start the timer for the client to read, because the send buffer is full."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """Stop the timer; if the connection is closing, start it again for the remaining data."""
        self._client_read()
        super().resume_writing()
        self._expect_rest()

    def on_response_complete(self) -> None:
        """Start the timer for unread data if the connection is closing."""
        if self.pipeline:
            self._answered = self.pipeline[-1][0]  # it is next
        super().on_response_complete()
        self._expect_rest()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, with a timer for unread data."""
        super().timeout_keep_alive_handler()
        self._expect_rest()

    def close_response(self) -> None:
        """Close after a response; if the body is not complete, once it is, within `receive_s`.

        To close with unread data is a reset: a client that still sends would get that in place of the response.
        """
        cycle = self._answered
        assert cycle is not None, "it has a response"
        continues = cycle.more_body and not self.expect_100_continue
        self._ends_with_body = cycle.response_complete and continues
        if not self._ends_with_body:
            self.transport.close()

    def _close(self) -> None:
        self.transport.close()
        self._expect_rest()

    def _expect_rest(self) -> None:
        # A closing transport waits without limit until its buffer is sent.
        if self.transport.is_closing():
            self._expect_reading()

    def _expect_reading(self) -> None:
        if self._reading is None:
            self._reading = self.loop.call_later(self._limits.send_s, self.transport.abort)

    def _client_read(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None


class _ResponseTransport:
    """The transport of one response."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing
        self.close = protocol.close_response


def _end_by_closing(cycle: RequestResponseCycle) -> None:
    """End a response of unknown length by closing the connection, the only possibility in HTTP/1.0."""
    cycle.chunked_encoding = False
    send = cycle.send

    def send_as_it_is(message: ASGISendEvent) -> Awaitable[None]:
        # For each piece, because uvicorn compares the sum with the declared length.
        cycle.expected_content_length = len(cast("dict[str, bytes]", message).get("body", b""))
        return send(message)

    cycle.send = send_as_it_is  # type: ignore[method-assign, assignment]


def _head_refused(what: str, value: object, limit: object, setting: str) -> RequestRefused:
    message = limit_message(
        f"too many {what}", value=value, limit=limit, remedy=f"send fewer, or raise {setting}"
    )
    return RequestRefused(message, code="headers_too_large", status=431)


KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that the server never closes one just as a request is sent."""
SWITCH_INTERVAL_S = 0.0005


class HttpServer(uvicorn.Server):
    """Uvicorn without its signal handlers: vsched handles signals itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(app: ASGIApp, config: Config) -> HttpServer:
    """Create the server of an application; await its `serve`."""
    server = config.server
    return HttpServer(
        uvicorn.Config(
            app,
            host=server.host,
            port=server.port,
            http=partial(BoundedProtocol, limits=server),  # type: ignore[arg-type] # only called
            ws="none",  # WebSocket upgrades are ignored, like all others
            lifespan="off",
            access_log=False,
            log_config=None,  # uvicorn uses the same log handlers as everything else
            log_level="warning",
            proxy_headers=False,  # local clients are recognized by their connection
            timeout_keep_alive=KEEP_ALIVE_S,
        )
    )


def forgo_models(config: Config) -> None:
    """Disable library parts that only models need, for the life of this process, which only serves HTTP."""
    plugin = load_worker(config.generate.plugin, path="generate.plugin")
    plugin.forgo_models(config.model.path)


def raise_open_files_limit() -> None:
    """Raise the soft limit of open files, often 1024, to the hard limit of this process, and of those it starts.

    At the limit, libuv closes new connections without a response, and ranks cannot be restarted.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):  # a hard limit above the system's cannot be set again
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def favour_event_loop() -> None:
    """Reduce delays of the event loop, and so of heartbeats, in a server process.

    Call it after loading: later collections skip the objects that exist now, which live as long as the process;
    scanning them took up to 250 ms. Large memory blocks are returned to the system separately. A thread releases the
    GIL after half a millisecond instead of five: while threads prepare requests, the loop waits for its turn after each
    of them.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # another C library than glibc
        libc.malloc_trim(0)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


_REMEDIES = {
    errno.EADDRINUSE: ("server.port", "choose a free port, or 0 to let the system choose"),
    errno.EACCES: ("server.port", "choose a port from 1024 on, or 0 to let the system choose"),
}
_OTHER_HOST = (
    "server.host",
    "give an address of this machine: 127.0.0.1 for local clients only, 0.0.0.0 or :: for all",
)


def listen(config: Config) -> socket.socket:
    """Bind the address before anything is loaded, so that a port in use is reported at once.

    With several processes, the returned socket accepts no connections: it reserves the address for the `another` call
    of each process.

    Raises:
        ConfigError: If the address cannot be bound.
    """
    host, port = config.server.host.removeprefix("[").removesuffix("]"), config.server.port
    try:
        made = socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=2048,
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
        )
        # The address was free. Sockets that share it must set SO_REUSEPORT before they are bound.
        return made if config.server.processes == 1 else _kept(made)
    except OSError as error:
        # `create_server` repeats the address in its message; errors of name resolution are negative.
        code = error.errno or 0
        reason = os.strerror(code) if code > 0 else str(error.strerror).partition(" (while")[0]
        key, remedy = _REMEDIES.get(code, _OTHER_HOST)
        raise ConfigError(
            f"{key}: cannot listen on {host}:{port} ({reason}). Remedy: {remedy}"
        ) from error


def _kept(made: socket.socket) -> socket.socket:
    with made:
        kept, address = _unbound(made), made.getsockname()
    kept.bind(address)
    return kept


def another(kept: socket.socket) -> socket.socket:
    """Create another socket on the reserved address; the system distributes connections among them."""
    made = _unbound(kept)
    made.bind(kept.getsockname())
    return made


def _unbound(like: socket.socket) -> socket.socket:
    made = socket.socket(like.family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if like.family == socket.AF_INET6:
        alone = like.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, alone)
    return made
