"""`python -m tests.bench.hosts`: its links have the configured rates, and its table compares rounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import pytest_asyncio

from tests.bench.hosts.__main__ import Load
from tests.bench.hosts.links import Links
from tests.cable import Cable, Wire
from tests.patience import patience, until


@pytest_asyncio.fixture
async def echo() -> AsyncIterator[str]:
    """Yield the address of an echo server."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(100):
                writer.write(data)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def said_over(address: str, words: bytes) -> bytes:
    """Return the reply to these words."""
    ip, _, port = address.removeprefix("tcp://").rpartition(":")
    async with patience():
        reader, writer = await asyncio.open_connection(ip, int(port))
        try:
            writer.write(words)
            writer.write_eof()
            return await reader.read()
        finally:
            writer.close()


def test_wire_carries_one_thing_after_the_other() -> None:
    wire = Wire(100.0)
    assert [wire.carry(50, now_s) for now_s in (1.0, 1.0, 5.0)] == [1.5, 2.0, 5.5]
    assert Wire().carry(50, 1.0) == 1.0


async def test_cable_counts_what_its_wires_carry(echo: str) -> None:
    out, back, shared = Wire(1e6), Wire(), Wire()
    async with Cable(echo, out=(out, shared), back=(back, shared), latency_s=0.01) as cable:
        words = b"word" * 20_000
        assert await said_over(cable.address, words) == words
    assert (out.carried, back.carried, shared.carried) == (80_000, 80_000, 160_000)


async def test_pulled_cable_closes_no_connection(echo: str) -> None:
    async with Cable(echo) as cable:
        ip, _, port = cable.address.removeprefix("tcp://").rpartition(":")
        reader, writer = await asyncio.open_connection(ip, int(port))
        writer.write(b"word")
        async with patience():
            assert await reader.readexactly(4) == b"word"
        cable.pull()
        writer.write(b"word")
        await until(lambda: cable.lost == 4)
        received = asyncio.ensure_future(reader.read(1))
        cable.plug_in()
        assert await said_over(cable.address, b"word") == b"word"
        assert not received.done(), "a connection that lost bytes is lost, and open"
        received.cancel()
        writer.close()


@pytest.mark.slow
async def test_links_count_by_machine_and_direction(echo: str) -> None:
    with Links(echo, echo) as links:
        links.shape(1e6, 0.0)
        for size, address in enumerate(links.addresses.values(), start=1):
            assert await said_over(address, b"a" * size) == b"a" * size
        assert links.carried() == {
            "engine out": 1 + 2,
            "engine in": 1 + 2,
            "encoder out": 1,
            "encoder in": 1,
            "generator out": 2,
            "generator in": 2,
        }


def test_load_asks_each_about_pictures_of_its_own() -> None:
    load = Load(alone=2, busy=3, clients=1, tokens=8, side=448)
    assert load.parts(10) == (range(10, 11), range(11, 13), range(13, 16))
    assert load.pictures == 6
