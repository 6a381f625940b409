"""Sources of images and videos: data URLs, files of the allowed folder, and allowed hosts."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
import socket
import ssl
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pybase64
import pytest

from tests.each_case import each_case
from tests.unit.media.fakes import data_url
from vsched.config import MediaConfig
from vsched.errors import RequestRefused
from vsched.media import sources
from vsched.media.fetch import Target, fetch, is_public, parse, resolve
from vsched.media.formats import FORMATS, IMAGE, VIDEO, VIDEO_FORMATS, MediaKind
from vsched.media.sources import frames_of, read_local

SETTINGS = MediaConfig(image_bytes_max=3000)
BAD_BASE64 = (
    "A", "AAA==", "AA=", "AA-_", "AA%2", "AA%2G", "%20\n", "AAAA====", "AA==AA==",
    "AAAAAA==AAAA", "AAAAAAA=AAAAAAAA", "AAAAAAAA=AAA", "AAAAAAAA====", "Ã¤Ã¤", "",
)  # fmt: skip
MALFORMED = [
    *(f"data:image/png;base64,{text}" for text in BAD_BASE64),
    *("data:image/png;base64;charset=utf-8,AAAA", "data:image/png", "data:image/png,%89PNG"),
    f"data:image/png;name={'x' * 1000};base64,AAAA",
]


@each_case("piece_bytes", [8, 1024 * 1024])
def test_malformed_data_url_is_refused(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding in the middle, too, also where a piece ends."""
    monkeypatch.setattr(sources, "_PIECE_BYTES", piece_bytes)
    for reference in MALFORMED:
        with pytest.raises(RequestRefused) as caught:
            read_local(reference, SETTINGS)
        assert caught.value.status == 400, reference
        assert caught.value.code == "image_reference_invalid", reference


CONTENT = bytes(range(256)) * 8 + b"!"
BASE64 = pybase64.b64encode(CONTENT).decode()
LINES = pybase64.encodebytes(CONTENT).decode()


HEADS = (
    "data:image/png;charset=utf-8;base64", 'data:image/png;name="a b.png";base64',
    "data:image/png;  base64", "data: Image/PNG ; charset = x;BASE64", "data:;charset=utf-8;base64",
    "data:;base64", "data:png;base64", "data:text/plain;base64",
    "data:application/octet-stream;base64",
)  # fmt: skip


@each_case(
    "reference",
    [
        *(f"{head},{BASE64}" for head in HEADS),
        f"  \n DATA:Image/png;base64,{BASE64}\r\n ",
        f"data:image/png;base64,{LINES}",
        f"data:image/png;base64,{LINES}".replace("\n", "\r\n"),
        f"data:image/png;base64, {LINES} ".replace("\n", " \t\f"),
        f"data:image/png;base64,{BASE64.rstrip('=')}",
    ],
)
def test_data_url_may_have_parameters(reference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And whitespace, at any piece boundaries."""
    for piece_bytes in (5, 12, 1024 * 1024):
        monkeypatch.setattr(sources, "_PIECE_BYTES", piece_bytes)
        assert read_local(reference, SETTINGS) == CONTENT


@each_case(
    ("name", "kind"),
    [
        *((name, IMAGE) for name in FORMATS),
        *((name, VIDEO) for name in (*VIDEO_FORMATS, "video/mov", "video/mpegts", "video/mkv")),
    ],
)
def test_data_url_takes_every_format(name: str, kind: MediaKind) -> None:
    """The decoder, data URLs and fetches accept the same; of videos, common names as well."""
    assert read_local(data_url(b"x", name), SETTINGS, kind=kind) == b"x"


LARGE = r"limit 3000 bytes.*image_bytes_max"


@each_case(
    ("reference", "status", "text"),
    [
        # A MIME allow-list.
        (data_url(b"x", "image/svg+xml"), 400, "image/jpeg, image/webp, image/gif or image/bmp"),
        (data_url(bytes(3001)), 413, LARGE),
        (data_url(bytes(3002)), 413, LARGE),
        (f"data:;base64,{pybase64.encodebytes(bytes(3003)).decode()}", 413, LARGE),
        *(
            (reference, 400, "unknown scheme")
            for reference in ("ftp://x/y", "", "/etc/passwd", "javascript:x", "blob")
        ),
        ("file:///etc/hostname", 400, r"switched off.*media\.directory"),
    ],
)
def test_other_references_or_large_data_are_refused(reference: str, status: int, text: str) -> None:
    """Exactly the limit is accepted, and line breaks do not count."""
    with pytest.raises(RequestRefused, match=text) as caught:
        read_local(reference, SETTINGS)
    assert caught.value.status == status
    assert len(read_local(data_url(bytes(3000)), SETTINGS)) == 3000
    lines = pybase64.encodebytes(bytes(3000)).decode()
    assert len(read_local(f"data:;base64,{lines}", SETTINGS)) == 3000


def test_data_url_length_is_checked_before_base64() -> None:
    """50 MB cost no memory."""
    reference = "data:image/png;base64," + "A" * 50_000_000
    tracemalloc.start()
    try:
        with pytest.raises(RequestRefused, match="too large"):
            read_local(reference, SETTINGS)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "media" / "sub").mkdir(parents=True)
    (tmp_path / "media" / "sub" / "a b.png").write_bytes(b"inside")
    (tmp_path / "media" / "big.png").write_bytes(bytes(3001))
    (tmp_path / "secret.png").write_bytes(b"outside")
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "c.png").write_bytes(b"neighbour")
    (tmp_path / "media" / "link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "media" / "fine.png").symlink_to(tmp_path / "media" / "sub" / "a b.png")
    os.mkfifo(tmp_path / "media" / "pipe.png")
    return tmp_path


def file_settings(tree: Path) -> MediaConfig:
    return MediaConfig(image_bytes_max=3000, directory=str(tree / "media"))


@each_case("path", ["media/sub/a%20b.png", "media/fine.png", "media2/../media/fine.png"])
def test_file_under_the_directory_is_read(tree: Path, path: str) -> None:
    settings = file_settings(tree)
    assert read_local(f"file://{tree}/{path}", settings) == b"inside"
    assert read_local(f"file://localhost{tree}/{path}", settings) == b"inside"
    with pytest.raises(RequestRefused) as caught:
        read_local(f"file://{tree}/media/big.png", settings)
    assert caught.value.status == 413


OUTSIDE = (
    "secret.png", "media/../secret.png", "media/%2e%2e/secret.png", "media/link.png",
    "media2/c.png", "media/none.png", "media/sub", "media", "media/fine.png%00", "media/%ff.png",
    "media/pipe.png",
)  # fmt: skip
MISFORMED = ("file://otherhost{tree}/media/fine.png", "file:media/fine.png", "file://[bad")


@each_case("reference", [*(f"file://{{tree}}/{path}" for path in OUTSIDE), *MISFORMED])
def test_file_escapes_and_absences_read_alike(tree: Path, reference: str) -> None:
    """The error reveals nothing of the file system."""
    with pytest.raises(RequestRefused) as caught:
        read_local(reference.format(tree=tree), file_settings(tree))
    assert caught.value.code == "image_file_refused"
    assert "cannot be read" in caught.value.message
    assert str(tree) not in caught.value.message


def test_a_video_of_commas_makes_a_bounded_number_of_urls() -> None:
    frames = frames_of("data:video/jpeg;base64," + 100_000 * ",")
    assert len(frames) == 65_537  # more than media.video_frames_max: it is refused


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


@each_case(
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


REFUSED_URLS = (
    "http://other.example/", "http://ok.example.evil.example/", "http://ok.example:8080/",
    "http://ports.example/", "http://ok\\@bad/", "http://ok.example\\@bad.example/",
    "http://ok.example@bad.example/", "http://user:password@ok.example/",
    "http://ok.example%2f@bad.example/", "http://ok.example\t/", "http://ok.example/a b",
    "http://ok.example\r\nHost: bad/", "http://ök.example/", "http://ok.example:99999/",
    "http://ok.example:port/", "http://[::1/", "http:///a.png", "http:ok.example",
    "http://ok.example/" + "a" * 3000, "http://0x7f000001/", "http://[::ffff:127.0.0.1]/",
    "http://169.254.169.254/",
)  # fmt: skip
UNLISTED = ["http://no.example:8080/", "http://[2606:4700::2]/", "https://ok.example:80/"]


@each_case(
    ("url", "settings", "text"),
    [
        *((url, OPEN, "") for url in REFUSED_URLS),
        *((url, OPEN, "host and port are not allowed") for url in UNLISTED),
        ("https://ok.example/a.png", MediaConfig(), r"switched off.*media\.hosts"),
    ],
)
def test_unlisted_or_malformed_urls_are_refused(url: str, settings: MediaConfig, text: str) -> None:
    """One parser, an allow-list of hosts and ports, which is empty by default."""
    with pytest.raises(RequestRefused) as caught:
        parse(url, settings)
    assert re.search(text, caught.value.message)
    assert caught.value.code == "image_url_refused"
    assert "example" not in caught.value.message


PUBLIC = "93.184.216.34 2606:4700::1 ::ffff:93.184.216.34"
NOT_PUBLIC = """
    127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 100.64.0.1 169.254.169.254 0.0.0.0 224.0.0.1 255.255.255.255
    ::1 :: fe80::1 fd00::1 ff02::1 ::ffff:127.0.0.1 64:ff9b::7f00:1 2002:7f00:1:: ::7f00:1
"""
"""Private, link-local, metadata, mapped and tunnelled addresses."""


def test_public_addresses_are_distinguished_from_all_others() -> None:
    for addresses, public in ((PUBLIC, True), (NOT_PUBLIC, False)):
        for address in addresses.split():
            assert is_public(ipaddress.ip_address(address)) is public, address


LOOPBACK = ["127.0.0.1", "0x7f000001", "2130706433", "[::ffff:127.0.0.1]", "[::1]", "localhost"]
LINK_LOCAL = ["169.254.169.254", "[::ffff:169.254.169.254]", "[fe80::1]"]


@each_case(
    ("host", "private"),
    [*((host, False) for host in LOOPBACK), *((host, True) for host in LINK_LOCAL)],
)
async def test_listed_host_with_private_address_is_refused(host: str, *, private: bool) -> None:
    """The resolved address counts; no configuration allows metadata services."""
    with pytest.raises(RequestRefused, match="not allowed"):
        await resolve(Target("http", host, 80, "/"), private=private)


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKS = b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"


@each_case("pieces", [(b"Content-Length: 5\r\n\r\n", b"ab", b"cde"), (CHUNKS,), (b"\r\nabcde",)])
async def test_fetch_returns_the_body(pieces: tuple[bytes, ...]) -> None:
    """By its length, in chunks, or until the connection is closed."""
    async with server(OK, *pieces) as (host, requests):
        assert await fetch(f"http://{host}/a.png?x=1", private(host)) == b"abcde"
    assert requests[0].startswith(f"GET /a.png?x=1 HTTP/1.1\r\nHost: {host}\r\n".encode())


async def test_certificates_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each image would block the event loop."""
    read = Mock(return_value=ssl.create_default_context())
    monkeypatch.setattr(ssl, "create_default_context", read)
    for _ in range(2):
        with pytest.raises(RequestRefused, match="could not be fetched"):
            await fetch("https://127.0.0.1:1/", private("127.0.0.1:1"))  # no listener
    assert read.call_count <= 1


async def test_fetch_resolves_a_name_once_and_judges_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS rebinding needs a second look-up, and there is none: the connection is to the address that was judged."""
    answers = [["127.0.0.1"], ["127.0.0.1", "169.254.169.254"]]
    loop = asyncio.get_running_loop()

    async def getaddrinfo(_name: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in answers.pop(0)]

    class Loop:
        def __getattr__(self, name: str) -> Any:
            return getaddrinfo if name == "getaddrinfo" else getattr(loop, name)

    async with server(OK + b"Content-Length: 3\r\n\r\nabc") as (host, requests):
        monkeypatch.setattr("vsched.media.fetch.asyncio.get_running_loop", Loop)
        name = f"pinned.invalid:{host.partition(':')[2]}"
        assert await fetch(f"http://{name}/", private(name)) == b"abc"
        with pytest.raises(RequestRefused, match="not allowed"):
            await fetch(f"http://{name}/", private(name))
    (request,) = requests
    assert f"Host: {name}\r\n".encode() in request
    assert answers == []


@each_case(
    ("pieces", "limits", "status", "text"),
    [
        *(
            (pieces, {"image_bytes_max": 10}, 413, "limit 10 bytes")
            for pieces in (
                [OK + b"Content-Length: 11\r\n\r\n"],
                [OK + b"\r\n", b"x" * 6, b"x" * 5],
                [OK + b"Transfer-Encoding: chunked\r\n\r\nb\r\n", b"x" * 11],
            )
        ),
        *(
            (pieces, {"fetch_s": 0.05}, 400, r"limit 0\.05 s")
            for pieces in ([], [OK], [OK + b"\r\nabc"])
        ),
    ],
)
async def test_fetch_bounds_the_bytes_while_they_stream_and_the_total_time(
    pieces: list[bytes], limits: dict[str, Any], status: int, text: str
) -> None:
    """With and without Content-Length; one deadline over everything."""
    async with server(*pieces, pause=True) as (host, _):
        with pytest.raises(RequestRefused, match=text) as caught:
            await fetch(f"http://{host}/", private(host, **limits))
    assert caught.value.status == status


@each_case(
    ("answer", "text"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://a/\r\n\r\n", "redirects are not followed"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "status 404"),
        (b"HTTP/1.1 206 Partial Content\r\nContent-Length: 1\r\n\r\nx", "status 206"),
        (OK + b"Content-Encoding: gzip\r\n\r\nx", "could not be fetched"),
        (b"SSH-2.0-OpenSSH\r\n", "could not be fetched"),
        (OK + b"X: " + b"y" * 100_000, "could not be fetched"),
        (b"", "could not be fetched"),
    ],
)
async def test_fetch_refuses_other_answers(answer: bytes, text: str) -> None:
    """A redirect to loopback is not followed; no address in the text."""
    async with server(answer) as (host, requests):
        with pytest.raises(RequestRefused, match="not allowed"):
            await fetch(f"http://{host}/", MediaConfig(hosts=(host,)))
        assert not requests, "a private address needs its permission"
        with pytest.raises(RequestRefused, match=text) as caught:
            await fetch(f"http://{host}/", private(host))
    assert "127.0.0.1" not in caught.value.message
    with pytest.raises(RequestRefused, match="could not be fetched"):
        await fetch(f"http://{host}/", private(host))  # no listener
