"""Clients that stall, over real sockets: every phase of a connection is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import uvicorn
from uvicorn.server import ServerState

from tests.each_case import each_case
from tests.patience import NEVER_S, PATIENCE_S, patience, until
from tests.unit.api.fakes import CHAT, FakeEngine, chat, served
from vsched.aio.streams import OutputDelta
from vsched.api import ApiSettings, create_app, http_server
from vsched.api.http_server import BoundedProtocol, another, listen
from vsched.api.processes.supervisor import share_of
from vsched.config import Config, ServerConfig
from vsched.errors import ConfigError

SOON_S = 0.05
LINE = b"POST /v1/chat/completions HTTP/"
HOST = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"
HEAD = LINE + b"1.1\r\n" + HOST + JSON
GET = b"GET /health HTTP/1.1\r\n" + HOST
BODY = msgspec.json.encode(chat())
STREAM = msgspec.json.encode(chat(stream=True))


def sized(body: bytes) -> bytes:
    return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


SIZED = sized(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
REQUEST = HEAD + SIZED


class RawClient:
    """A connection that sends and reads only when a test says so."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        with contextlib.suppress(ConnectionError):  # a refused connection may be closed already
            await self._writer.drain()

    async def answer(self) -> bytes:
        """Return all bytes until the server closes, as it must."""
        received = b""
        async with patience():
            with contextlib.suppress(ConnectionError):
                while piece := await self._reader.read(1 << 16):
                    received += piece
        return received

    async def response(self) -> bytes:
        """Return the head of the next response, and consume its body."""
        async with patience():
            head = await self._reader.readuntil(b"\r\n\r\n")
            size = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            await self._reader.readexactly(int(size))
        return head

    async def exactly(self, size: int) -> bytes:
        async with patience():
            return await self._reader.readexactly(size)

    def send_no_more(self) -> None:
        self._writer.write_eof()

    def leave(self) -> None:
        self._writer.close()

    def close(self) -> None:
        self._writer.transport.abort()


@contextlib.asynccontextmanager
async def connected(port: int, receive_bytes: int = 0) -> AsyncIterator[RawClient]:
    opened = socket.socket()
    if receive_bytes:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    opened.setblocking(False)
    await asyncio.get_running_loop().sock_connect(opened, ("127.0.0.1", port))
    # Limits read-ahead, or no bytes would ever be left unread.
    reader, writer = await asyncio.open_connection(sock=opened, limit=1024)
    client = RawClient(reader, writer)
    try:
        yield client
    finally:
        client.close()


async def exchange(
    sent: bytes, engine: FakeEngine | None = None, *, ends: bool = False, **server: Any
) -> bytes:
    """Return all that a server with these settings sends until it closes; the client sends no more if it `ends`."""
    async with served(engine or FakeEngine(), **server) as port, connected(port) as client:
        await client.send(sent)
        if ends:
            client.send_no_more()
        return await client.answer()


def error_of(answer: bytes) -> dict[str, str]:
    """Error of the last response."""
    error: dict[str, str] = msgspec.json.decode(answer.rpartition(b"\r\n\r\n")[2])["error"]
    return error


async def test_connection_trickling_body_is_answered() -> None:
    """Every byte is in time, the whole body is not: one deadline covers the whole request."""
    async with served(FakeEngine(), receive_s=2 * SOON_S) as port, connected(port) as client:
        await client.send(HEAD + b"Content-Length: 100000\r\n\r\n")
        answer = asyncio.create_task(client.answer())
        while not answer.done():
            await client.send(b" ")
            await asyncio.sleep(SOON_S / 10)
        assert (await answer).startswith(b"HTTP/1.1 408 ")


async def test_connection_deadline_is_of_each_request_and_not_of_the_answer() -> None:
    """A request that has arrived is served as long as that takes, and so is the next one."""
    released = asyncio.Event()
    engine = FakeEngine(released, OutputDelta("x", [1], finish_reason="stop"))
    async with served(engine, receive_s=SOON_S) as port, connected(port) as client:
        for _ in range(2):
            released.clear()
            await client.send(REQUEST)
            await until(lambda: engine.generations and not engine.generations[-1].aborted)
            async with connected(port) as other:
                await other.answer()  # the deadline of a request that came no earlier has passed
            released.set()
            assert b"200 OK" in await client.response()
            await until(lambda: engine.generations[-1].aborted)
    assert len(engine.generations) == 2


async def test_connection_rest_of_a_refused_body_is_not_waited_for() -> None:
    """The deadline also covers the unread rest of a request that was refused early."""
    head = b"POST /nowhere HTTP/1.1\r\n" + HOST + b"Content-Length: 9\r\n" + JSON
    answer = await exchange(head + b"\r\n{", receive_s=2 * SOON_S)
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert answer.count(b"HTTP/1.1") == 1


@each_case("path", [CHAT, "/nowhere"])
async def test_connection_client_that_sends_all_of_its_body_gets_the_refusal(path: str) -> None:
    """Not a reset: most clients read no response before they have sent the request."""

    def send(port: int) -> int:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        with contextlib.closing(client):
            client.request("POST", path, b" " * (64 << 20), {"Content-Type": "application/json"})
            return client.getresponse().status

    async with served(FakeEngine()) as port:
        assert await asyncio.to_thread(send, port) == (413 if path == CHAT else 404)


@each_case(("body", "half", "end"), [(BODY, b"GET /hea", b"}"), (STREAM, REQUEST[:-1], b"[DONE]")])
async def test_connection_pipelined_request_waits(body: bytes, half: bytes, end: bytes) -> None:
    """Half a request does not end the response in progress; its deadline starts after that, and so does its 408."""
    released = asyncio.Event()
    last = OutputDelta("x", [1], finish_reason="stop")
    engine = FakeEngine(OutputDelta("x", [1]), released, last)
    async with served(engine, receive_s=SOON_S) as port, connected(port) as client:
        await client.send(HEAD + sized(body))
        await until(lambda: engine.generations)
        await client.send(half)
        for _ in range(2):  # twice the deadline: that of the half request has passed
            async with connected(port) as other:
                await other.answer()
        assert not engine.generations[0].aborted
        released.set()
        first, late, _ = (await client.answer()).partition(b"HTTP/1.1 408 ")
    assert late
    assert first.startswith(b"HTTP/1.1 200 ")
    assert first.count(b"HTTP/1.1") == 1
    assert end in first


async def test_connection_trailer_is_no_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that checks or sets headers passes trailers on."""
    monkeypatch.setenv("KEY", "secret")
    sent = HEAD + CHUNKED.removesuffix(b"\r\n") + b"Authorization: Bearer secret\r\n\r\n"
    assert (await exchange(sent, api_key_variable="KEY")).startswith(b"HTTP/1.1 401 ")


async def test_connection_head_within_its_limits_is_served() -> None:
    """It is counted again for each request, without the body, which may come with half of the next head."""
    headers = b"".join(b"X-%d: %s\r\n" % (index, b"y" * 300) for index in range(97))
    line, rest = GET.split(HOST)
    async with served(FakeEngine()) as port, connected(port) as client:
        for _ in range(3):
            await client.send(HEAD + sized(BODY + b" " * 40_000) + line)
            assert (await client.response()).startswith(b"HTTP/1.1 200 ")
            await client.send(HOST + rest + headers + b"\r\n")
            assert (await client.response()).startswith(b"HTTP/1.1 200 ")


@each_case(
    ("sent", "limits", "line"),
    [
        (b"\x16\x03\x01\r\n", {}, "- - 400"),
        (b"GET /load?key=secret HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", {}, "GET /load 400"),
        (b"G", {"receive_s": SOON_S}, "- - 408"),
        (HEAD + b"Content-Length: 9\r\n\r\n{", {"receive_s": SOON_S}, f"POST {CHAT} 408"),
        (GET + b"\r\n", {"max_connections": 1}, "GET /health 503"),
    ],
)
async def test_connection_access_log_has_requests_that_reach_no_application(
    sent: bytes, limits: dict[str, float], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    with caplog.at_level(logging.INFO, "vsched.access"):
        async with (
            served(FakeEngine(), access_log=True, **limits) as port,
            connected(port),
            connected(port) as client,
        ):
            await client.send(sent)
            answer = await client.exactly(12)
    (record,) = [one for one in caplog.records if one.name == "vsched.access"]
    assert record.getMessage().partition(" ")[2].startswith(f"{line} ")
    assert answer.decode().endswith(line[-3:])


async def test_connection_limit_is_the_number_of_connections_that_are_served() -> None:
    async with (
        served(FakeEngine(), max_connections=2) as port,
        connected(port) as first,
        connected(port) as second,
    ):
        for client in (first, second):
            await client.send(GET + b"\r\n")
            assert b" 200 OK" in await client.response()
        async with connected(port) as third:
            await third.send(GET + b"\r\n")
            answer = await third.answer()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"x-request-id: " in answer
        assert "value 3, limit 2. Remedy: " in error_of(answer)["message"]
        await first.send(GET + b"\r\n")
        assert b" 200 OK" in await first.response()


@each_case("stream", [True, False])
async def test_connection_client_that_stops_reading_is_cut_off(stream: bool) -> None:
    """Its request is aborted and leaves nothing; a client that reads gets everything, however much that is."""
    last = OutputDelta("x", [1], finish_reason="stop")
    never = [asyncio.Event()] if stream else []
    engine = FakeEngine(*[OutputDelta("x" * (1 << 20), [1])] * 8, *never, last)
    async with served(engine, send_s=SOON_S) as port, connected(port, 4096) as client:
        await client.send(HEAD + sized(STREAM if stream else BODY))
        await until(lambda: engine.generations and engine.generations[0].aborted)
        received = await client.answer()
        assert b"200 OK" in received
        assert not received.endswith((b"0\r\n\r\n", b"}"))


async def test_connection_client_that_reads_slowly_gets_everything() -> None:
    engine = FakeEngine(OutputDelta("x" * (1 << 20), [1]), OutputDelta("", [], None, "stop"))
    async with served(engine) as port, connected(port, 4096) as client:
        await client.send(HEAD + b"Connection: close\r\n" + sized(STREAM))
        received = await client.answer()
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert received.count(b"x") >= 1 << 20


# --- the rules of HTTP ---


@each_case("body", [SIZED, CHUNKED])
@each_case(
    "offer",
    [
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n",
        b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
        b"Upgrade: TLS/1.0\r\nConnection: keep-alive\r\nConnection: Upgrade\r\n",
    ],
)
async def test_connection_offer_of_another_protocol_is_ignored(offer: bytes, body: bytes) -> None:
    """On one connection, twice at once, and in pieces: the body belongs to the request."""
    request = HEAD + offer + body
    async with served(FakeEngine()) as port, connected(port) as client:
        await client.send(request + request)
        for _ in range(2):
            assert (await client.response()).startswith(b"HTTP/1.1 200 ")
        for index in range(0, len(request), 60):
            await client.send(request[index : index + 60])
            await asyncio.sleep(0)
        assert (await client.response()).startswith(b"HTTP/1.1 200 ")


@each_case("requested", [b"", b"Connection: keep-alive\r\n", b"Expect: 100-continue\r\n"])
@each_case("body", [BODY, STREAM])
async def test_connection_answer_to_old_http_ends_with_it(requested: bytes, body: bytes) -> None:
    """HTTP/1.0 has neither chunks nor 100 Continue, and needs no Host."""
    answer = await exchange(LINE + b"1.0\r\n" + JSON + requested + sized(body))
    head, _, content = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nconnection: close" in head
    assert b"transfer-encoding" not in head
    if body is STREAM:
        assert content.startswith(b'data: {"id"')
        assert content.endswith(b"}\n\ndata: [DONE]\n\n")
    else:
        assert msgspec.json.decode(content)["choices"][0]["message"]["content"] == "Hello"


MANY = b"".join(b"X-%d: y\r\n" % index for index in range(5000))
LONG = b"X: " + b"y" * 100_000
CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n"
SMALL = {"header_bytes_max": 1024}
WAITS = {"receive_s": NEVER_S}
ONE_HOST = "Host headers, limit 1 Host header. Remedy"
TOO_SLOW = "request_timeout: .*limit 0.05 s. Remedy: send it faster, or raise server.receive_s"
HEAD_LIMIT = ".*Remedy: send fewer, or raise server.header"


@each_case(
    ("sent", "options", "status", "error"),
    [
        # It does not arrive, wherever it stops, or the client ends it too soon.
        *(
            (sent, {"receive_s": SOON_S}, 408, TOO_SLOW)
            for sent in (
                *(b"G", GET + b"X-Slow: 1", HEAD + CHUNKS + b"5\r\n{"),
                HEAD + b"Content-Length: 100\r\n\r\n{",
                HEAD + b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n",
            )
        ),
        *(
            (sent, {"ends": True}, 400, "request_incomplete: ")
            for sent in (HEAD, HEAD + b"Content-Length: 100\r\n\r\n{", REQUEST[:-1])
        ),
        # Its head comes at once, in parts, or without an end.
        (GET + MANY, WAITS, 431, f"too many headers: value 101{HEAD_LIMIT}"),
        (GET + LONG + b"\r\n", WAITS, 431, f"too many bytes in URL{HEAD_LIMIT}"),
        (GET + LONG, WAITS, 431, f"URL and headers: value at least{HEAD_LIMIT}"),
        (GET.replace(b"health", b"x" * 1100) + b"\r\n", SMALL, 431, f"URL{HEAD_LIMIT}"),
        (GET + LONG[:1100] + b"\r\n\r\n", SMALL, 431, f"URL{HEAD_LIMIT}"),
        (HEAD + CHUNKS + b"0\r\n" + LONG[:1000] + b"\r\n\r\n", SMALL, 431, f"URL{HEAD_LIMIT}"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 TLS\r\n\r\n", {}, 400, "invalid_http: "),
        (LINE + b"1.1\r\n" + JSON + SIZED, {}, 400, f"value 0 {ONE_HOST}"),
        *(
            (LINE + version + b"\r\n" + HOST * 2 + JSON + SIZED, {}, 400, f"value 2 {ONE_HOST}")
            for version in (b"1.0", b"1.1")
        ),
        (HEAD + b"Content-Length: 2\r\n" + SIZED, {}, 400, "Duplicate Content-Length"),
        (HEAD + b"Content-Length: 2\r\n" + CHUNKED, {}, 400, "with Content-Length"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {}, 400, "without TLS or HTTP/2"),
        (b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n", {}, 501, "not a proxy"),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", {}, 501, "limit chunked. Remedy"),
    ],
)
async def test_connection_request_that_is_incomplete_or_invalid_is_answered_with_the_reason(
    sent: bytes, options: dict[str, Any], status: int, error: str
) -> None:
    """Once, and the application sees nothing of it."""
    engine = FakeEngine()
    answer = await exchange(sent, engine, **options)
    answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    assert len(re.findall(rb"HTTP/1\.1 \d", answer)) == 1
    found = error_of(answer)
    assert re.search(error, f"{found['code']}: {found['message']}")
    assert engine.calls == []


async def test_connection_that_sends_nothing_is_closed_without_a_response() -> None:
    """A client that connects early may not need the connection."""
    assert await exchange(b"", receive_s=SOON_S) == b""


@each_case("version", [b"1.0", b"1.1"])
@each_case("body", [BODY, STREAM])
async def test_connection_client_that_sends_no_more_gets_its_answer(
    version: bytes, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a long time, behind interim responses."""
    monkeypatch.setattr(http_server, "_FIRST_PROBE_S", 1e-4)
    released = asyncio.Event()
    engine = FakeEngine(OutputDelta("x", [1]), released, OutputDelta("y", [1], None, "stop"))
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    async with served(engine) as port, connected(port) as client:
        await client.send(LINE + version + b"\r\n" + HOST + JSON + sized(body))
        client.send_no_more()
        await until(lambda: engine.generations)
        if version == b"1.1" and body is BODY:
            assert await client.exactly(2 * len(interim)) == 2 * interim
        released.set()
        head, _, content = (await client.answer()).replace(interim, b"").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nconnection: close" in head or body is STREAM
    assert content.count(b'"content":"') == (2 if body is STREAM else 1)
    assert content.endswith((b"data: [DONE]\n\n", b"0\r\n\r\n") if body is STREAM else b"}")


async def test_connection_client_that_sends_no_more_gets_all_its_answers() -> None:
    assert (await exchange(3 * REQUEST, ends=True)).count(b"HTTP/1.1 200 OK") == 3


@each_case("sent", [HEAD + sized(BODY), HEAD + sized(STREAM), REQUEST + GET + b"\r\n"])
@each_case("leave", [RawClient.leave, RawClient.close])
async def test_connection_left_is_noticed(sent: bytes, leave: Callable[[RawClient], None]) -> None:
    """Before the response has begun, within a stream, and if another request was pipelined."""
    engine = FakeEngine(OutputDelta("x", [1]), asyncio.Event())
    async with served(engine) as port, connected(port) as client:
        await client.send(sent)
        await until(lambda: engine.generations)
        leave(client)
        await until(lambda: engine.generations[0].aborted)


def refuse(protocol: BoundedProtocol) -> None:
    protocol.data_received(b"this is not HTTP\r\n\r\n")


def end_answer(protocol: BoundedProtocol) -> None:
    protocol.transport.close()
    protocol.on_response_complete()


def read_a_part(protocol: BoundedProtocol) -> None:
    protocol.pause_writing()
    protocol.transport.close()
    protocol.resume_writing()


@each_case("close", [refuse, end_answer, read_a_part, BoundedProtocol.timeout_keep_alive_handler])
async def test_connection_closes_without_a_reader(close: Callable[[BoundedProtocol], None]) -> None:
    """Whatever closed it: a transport waits for ever for its buffered bytes to leave."""
    app = create_app(FakeEngine(), ApiSettings())
    config = uvicorn.Config(app, lifespan="off", log_config=None)
    config.load()
    limits = ServerConfig(send_s=SOON_S, receive_s=NEVER_S)
    protocol = BoundedProtocol(
        config=config, server_state=ServerState(), app_state={}, limits=limits
    )
    # A connection whose client reads nothing: written bytes never leave, and closing does not end.
    transport = Mock(spec=asyncio.Transport, get_extra_info=lambda *_: None)
    transport.is_closing = lambda: transport.close.called
    protocol.connection_made(transport)
    close(protocol)
    assert (transport.close.called, transport.abort.called) == (True, False)
    await until(lambda: transport.abort.called)
    protocol.connection_lost(None)


def config(**server: object) -> Config:
    return Config(server=ServerConfig(**{"port": 0, "processes": 2, **server}))  # type: ignore[arg-type]


def test_listener_of_several_processes_only_keeps_the_address() -> None:
    """It accepts no connections itself; each process has its own socket on the port, and another server none."""
    with listen(config()) as kept:
        address = kept.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        with another(kept) as one, another(kept) as other:
            received = {one: 0, other: 0}
            for listener in received:
                assert listener.getsockname() == address
                listener.listen()
                listener.setblocking(False)
            with pytest.raises(ConfigError, match=r"server\.port: .*already in use"):
                listen(config(port=address[1]))
            for _ in range(64):
                with socket.create_connection(address):
                    pass
            for listener in received:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        listener.accept()[0].close()
                        received[listener] += 1
            assert sum(received.values()) == 64
            assert min(received.values()) > 8, "one gets nearly all"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6 here")
def test_listener_for_both_families_stays_one() -> None:
    with listen(config(host="::")) as kept, another(kept) as one:
        one.listen()
        with socket.create_connection(("127.0.0.1", kept.getsockname()[1])):
            pass


def test_shares_of_processes_add_up_to_the_setting() -> None:
    settings = ApiSettings(bodies_bytes_max=1000, body_bytes_max=500)
    share = share_of(settings, 3)
    assert share.bodies_bytes_max == 334
    assert share.body_bytes_max == 500, "one body may be as large as before"
