from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from vsched.config import MediaConfig
from vsched.errors import RequestRefused
from vsched.media.fetch import Target, fetch, is_public, parse, resolve
from vsched.media.formats import IMAGE, MediaKind

OPEN = MediaConfig(hosts=("ok.example", "ports.example:8080", "[2606:4700::1]"))


@contextlib.asynccontextmanager
async def server(*pieces: bytes, pause: bool = False) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Reply to every connection with these bytes; `pause` keeps it open after them."""
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            requests.append(await reader.readuntil(b"\r\n\r\n"))
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if pause:
                await reader.read()
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listener:
        yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}", requests


def private(host: str, **limits: Any) -> MediaConfig:
    return MediaConfig(hosts=(host,), private_hosts=(host,), **limits)


def test_remote_images_are_off_by_default() -> None:
    """Off until hosts are configured."""
    with pytest.raises(RequestRefused, match=r"switched off.*media\.hosts"):
        parse("https://ok.example/a.png", MediaConfig())


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://ok.example/a.png?b=c#d", Target("http", "ok.example", 80, "/a.png?b=c")),
        ("HTTPS://OK.example", Target("https", "ok.example", 443, "/")),
        (" https://ok.example/a.png\n", Target("https", "ok.example", 443, "/a.png")),
        ("http://ports.example:8080/", Target("http", "ports.example", 8080, "/")),
        ("http://[2606:4700::1]/", Target("http", "[2606:4700::1]", 80, "/")),
    ],
)
def test_listed_hosts_are_accepted(url: str, target: Target) -> None:
    assert parse(url, OPEN) == target


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/",
        "http://ok.example.evil.example/",
        "http://ok.example:8080/",
        "http://ports.example/",
        "http://ok\\@bad/",
        "http://ok.example\\@bad.example/",
        "http://ok.example@bad.example/",
        "http://user:password@ok.example/",
        "http://ok.example%2f@bad.example/",
        "http://ok.example\t/",
        "http://ok.example/a b",
        "http://ok.example\r\nHost: bad/",
        "http://ök.example/",
        "http://ok.example:99999/",
        "http://ok.example:port/",
        "http://[::1/",
        "http:///a.png",
        "http:ok.example",
        "http://ok.example/" + "a" * 3000,
        "http://0x7f000001/",
        "http://[::ffff:127.0.0.1]/",
        "http://169.254.169.254/",
    ],
)
def test_unlisted_and_malformed_urls_are_refused(url: str) -> None:
    """One parser, an allow-list of hosts and ports."""
    with pytest.raises(RequestRefused) as caught:
        parse(url, OPEN)
    assert caught.value.code == "image_url_refused"
    assert "example" not in caught.value.message


@pytest.mark.parametrize(
    "url", ["http://no.example:8080/", "http://[2606:4700::2]/", "https://ok.example:80/"]
)
def test_unlisted_host_or_port_is_named(url: str) -> None:
    with pytest.raises(RequestRefused, match="host and port are not allowed"):
        parse(url, OPEN)


PUBLIC = "93.184.216.34 2606:4700::1 ::ffff:93.184.216.34"
NOT_PUBLIC = """
    127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 100.64.0.1 169.254.169.254 0.0.0.0 224.0.0.1 255.255.255.255
    ::1 :: fe80::1 fd00::1 ff02::1 ::ffff:127.0.0.1 64:ff9b::7f00:1 2002:7f00:1:: ::7f00:1
"""
"""Private, link-local, metadata, mapped and tunnelled addresses."""


def test_public_addresses_are_told_from_all_others() -> None:
    for addresses, public in ((PUBLIC, True), (NOT_PUBLIC, False)):
        for address in addresses.split():
            assert is_public(ipaddress.ip_address(address)) is public, address


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "0x7f000001", "2130706433", "[::ffff:127.0.0.1]", "[::1]", "localhost"]
)
async def test_listed_host_with_private_address_is_refused(host: str) -> None:
    """The resolved address counts."""
    with pytest.raises(RequestRefused, match="not allowed"):
        await resolve(Target("http", host, 80, "/"), private=False)


@pytest.mark.parametrize("host", ["169.254.169.254", "[::ffff:169.254.169.254]", "[fe80::1]"])
async def test_link_local_is_refused_even_for_private_hosts(host: str) -> None:
    """No configuration allows metadata services."""
    with pytest.raises(RequestRefused, match="not allowed"):
        await resolve(Target("http", host, 80, "/"), private=True)


async def test_name_is_resolved_once_and_one_bad_address_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DNS rebinding needs a second look-up, and there is none."""
    answers = [["93.184.216.34"], ["93.184.216.34", "10.0.0.1"]]
    loop = asyncio.get_running_loop()

    async def getaddrinfo(*_: Any, **__: Any) -> list[Any]:
        family = socket.AF_INET
        return [(family, socket.SOCK_STREAM, 6, "", (address, 80)) for address in answers.pop(0)]

    class Loop:
        def __getattr__(self, name: str) -> Any:
            return getaddrinfo if name == "getaddrinfo" else getattr(loop, name)

    monkeypatch.setattr("vsched.media.fetch.asyncio.get_running_loop", Loop)
    target = Target("http", "ok.example", 80, "/")
    assert await resolve(target, private=False) == "93.184.216.34"
    with pytest.raises(RequestRefused, match="not allowed"):
        await resolve(target, private=False)
    assert answers == []


async def test_fetch_returns_the_body() -> None:
    async with server(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", b"he", b"llo") as (
        host,
        requests,
    ):
        assert await fetch(f"http://{host}/a.png?x=1", private(host)) == b"hello"
    assert requests[0].startswith(f"GET /a.png?x=1 HTTP/1.1\r\nHost: {host}\r\n".encode())


async def test_fetch_connects_to_the_address_that_was_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The name is not resolved again: only the checked address replies."""

    async def resolve_once(_target: Target, *, private: bool, kind: MediaKind) -> str:
        assert private
        assert kind is IMAGE
        return "127.0.0.1"

    monkeypatch.setattr("vsched.media.fetch.resolve", resolve_once)
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"
    async with server(answer) as (host, requests):
        name = f"pinned.invalid:{host.partition(':')[2]}"
        assert await fetch(f"http://{name}/", private(name)) == b"abc"
    assert f"Host: {name}\r\n".encode() in requests[0]


async def test_fetch_understands_chunks_and_closing() -> None:
    chunked = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )
    async with server(chunked) as (host, _):
        assert await fetch(f"http://{host}/", private(host)) == b"abcde"
    async with server(b"HTTP/1.1 200 OK\r\n\r\nabc") as (host, _):
        assert await fetch(f"http://{host}/", private(host)) == b"abc"


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 6, b"x" * 5],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nb\r\n", b"x" * 11],
    ],
)
async def test_fetch_bounds_the_bytes_while_they_stream(pieces: list[bytes]) -> None:
    """With and without Content-Length."""
    async with server(*pieces, pause=True) as (host, _):
        with pytest.raises(RequestRefused, match="limit 10 bytes") as caught:
            await fetch(f"http://{host}/", private(host, image_bytes_max=10))
    assert caught.value.status == 413


@pytest.mark.parametrize("pieces", [[], [b"HTTP/1.1 200 OK\r\n"], [b"HTTP/1.1 200 OK\r\n\r\nabc"]])
async def test_fetch_bounds_the_total_time(pieces: list[bytes]) -> None:
    """One deadline over everything."""
    async with server(*pieces, pause=True) as (host, _):
        with pytest.raises(RequestRefused, match=r"limit 0\.05 s"):
            await fetch(f"http://{host}/", private(host, fetch_s=0.05))


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\n\r\n",
            "redirects are not followed",
        ),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "status 404"),
        (b"HTTP/1.1 206 Partial Content\r\nContent-Length: 1\r\n\r\nx", "status 206"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\nx", "could not be fetched"),
        (b"SSH-2.0-OpenSSH\r\n", "could not be fetched"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000, "could not be fetched"),
        (b"", "could not be fetched"),
    ],
)
async def test_fetch_refuses_other_answers(answer: bytes, text: str) -> None:
    """A redirect to loopback is not followed; no address in the text."""
    async with server(answer) as (host, _):
        with pytest.raises(RequestRefused, match=text) as caught:
            await fetch(f"http://{host}/", private(host))
    assert "127.0.0.1" not in caught.value.message


async def test_fetch_refuses_a_closed_port() -> None:
    async with server() as (host, _):
        pass
    with pytest.raises(RequestRefused, match="could not be fetched"):
        await fetch(f"http://{host}/", private(host))


async def test_fetch_needs_the_private_permission() -> None:
    async with server(b"HTTP/1.1 200 OK\r\n\r\nabc") as (host, requests):
        with pytest.raises(RequestRefused, match="not allowed"):
            await fetch(f"http://{host}/", MediaConfig(hosts=(host,)))
    assert requests == []
