"""Embeddings sent directly from the encoder's host to the reader's: the same tokens under any fault in between."""

from __future__ import annotations

import errno
from collections.abc import Callable

import msgspec
import pytest
import zmq

from tests.cable import Cable
from tests.patience import until
from tests.unit.rank.fake_plugin import Behaviour, expected_tokens
from tests.unit.rank.hosts import Hosts, hosts_of
from tests.unit.rank.worker_groups import Place, generate, read, shell_of
from vsched.aio.hosts.exchange import Exchange
from vsched.aio.hosts.keys import CurveKeys, PlainKeys
from vsched.aio.hosts.messages import Write
from vsched.aio.hosts.remote import RemoteHost
from vsched.aio.hosts.server import HostedStart
from vsched.aio.hosts.sockets import EngineSocket, HostSocket
from vsched.aio.hosts.stream import Stream
from vsched.aio.shell import Shell
from vsched.testing import make_request

pytestmark = pytest.mark.slow
THREE = (("encode",), ("generate-0",), ("generate-1",))


async def ask(shell: Shell, name: str, key: bytes) -> None:
    """Have an image described, and check that every row was right."""
    request = make_request(name, [14, 15], [(1, 6, key)])
    assert await read(generate(shell, request, max_tokens=10)) == expected_tokens(
        request.prompt_token_ids, 10
    )


async def reach(shell: Shell, exchange: Exchange) -> None:
    """Have hosts reach each other: the first image goes through the engine."""
    await ask(shell, "first", b"first")
    await until(lambda: exchange._ways and all(way.reached for way in exchange._ways.values()))
    assert exchange.bytes_direct == 0


async def test_direct_rows_do_not_pass_the_engine(place: Place) -> None:
    """All bytes are on the reader's host before its chunk is decided."""
    async with hosts_of("far", "farther") as hosts:
        exchange = hosts.launcher(place, encode=["far"], generate=["farther"]).exchange
        async with shell_of(place) as shell:
            await reach(shell, exchange)
            (way,) = exchange._ways.values()
            before = way.source.bytes_fetched
            await ask(shell, "second", b"second")
            assert exchange.bytes_direct == 6 * 16
            assert way.source.bytes_fetched == before


@pytest.mark.parametrize("encrypted", [True, False])
async def test_direct_rows_can_be_read_on_their_way_where_that_was_asked_for(
    place: Place, encrypted: bool
) -> None:
    """Only between the hosts: the engine's stream to either is encrypted."""
    async with (
        hosts_of("far", "farther") as hosts,
        Cable(hosts.running["far"].link.address) as to_far,
        Cable(hosts.running["farther"].link.address) as to_farther,
        Cable(to_far.address) as between,
    ):
        read = [to_far.read, to_farther.read, between.read] = [bytearray() for _ in range(3)]
        lead_through(between, hosts.running["farther"].link, at="127.0.0.2")
        hosts.know("far", to_far.address)
        hosts.know("farther", to_farther.address)
        exchange = hosts.launcher(
            place, encode=["far"], generate=["farther"], encrypted=encrypted
        ).exchange
        async with shell_of(place) as shell:
            await reach(shell, exchange)
            _, reader = ends_of_way(hosts)
            rows: list[bytes] = []
            write = reader._write
            reader._write = lambda message: rows.append(message.data) or write(message)  # type: ignore[func-returns-value]
            await ask(shell, "second", b"second")
            assert exchange.bytes_direct == len(b"".join(rows)) == 6 * 16
        assert all(read)
        seen = [[piece in one for piece in (*rows, b"Fetch")] for one in read]
        assert seen == [[False] * 4, [False] * 4, [not encrypted] * 4]


def lead_through(cable: Cable, link: HostSocket, *, at: str) -> None:
    """Have a host reach others, which are at an address, over a cable."""
    reach = link.reach

    def reached(
        address: str, keys: CurveKeys | PlainKeys, *heard: Callable[..., None]
    ) -> EngineSocket:
        if isinstance(keys, PlainKeys):
            cable.lead_to(f"tcp://{at}:{address.rpartition(':')[2]}")
        else:
            cable.lead_to(address)
        return reach(cable.address, keys, *heard)

    link.reach = reached  # type: ignore[method-assign, assignment]


async def test_direct_is_given_up_where_a_host_has_no_port_without_encryption(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are not exposed for that: they go through the engine, encrypted."""
    async with hosts_of("far", "farther") as hosts:
        asked: list[str] = []

        def plain() -> None:
            asked.append("far")
            raise zmq.ZMQError(errno.EADDRINUSE)

        monkeypatch.setattr(hosts.running["far"].link, "plain", plain)
        launcher = hosts.launcher(place, encode=["far"], generate=["farther"], encrypted=False)
        async with shell_of(place) as shell:
            for name in (b"first", b"second"):
                await ask(shell, name.decode(), name)
            assert asked == ["far"]
            assert not exchange_used(launcher.exchange)
            assert not any(row["losses"] for row in shell.groups())


async def test_direct_is_not_used_where_it_is_off_or_a_replica_is_here(place: Place) -> None:
    async with hosts_of("far", "farther") as hosts:
        off = hosts.launcher(place, encode=["far"], generate=["farther"], direct=False)
        assert not off.exchange.direct
        assert not hosts.launcher(
            place, encode=["far"], generate=["farther", "local"]
        ).exchange.direct
        place.launcher = off
        async with shell_of(place) as shell:
            await ask(shell, "first", b"first")
            await ask(shell, "second", b"second")
            assert not exchange_used(off.exchange)


def exchange_used(exchange: Exchange) -> bool:
    return bool(exchange._ways or exchange.bytes_direct)


async def test_direct_rows_need_not_leave_a_process_with_both_stages(place: Place) -> None:
    """They are read in the memory they were written to, and never sent to the engine."""
    async with hosts_of("far") as hosts:
        launcher = hosts.launcher(place, encode=["far"], generate=["far"])
        async with shell_of(place, groups=(("encode", "generate"),)) as shell:
            await ask(shell, "image", b"image")
            (host,) = launcher.exchange._readers.values()
            assert host.bytes_fetched == 0


def cut_at_source(exchange: Exchange, hosts: Hosts) -> None:
    """The encoder's host drops the reader and forgets it."""
    del exchange
    start = next(one for one in hosts.running["far"].server._starts.values() if one._takers)
    for key in [*start._takers]:
        start._cut(key)


def silence_source(exchange: Exchange, hosts: Hosts) -> None:
    """The encoder's host receives the reader's request and sends nothing: only a deadline detects it."""
    for start in hosts.running["far"].server._starts.values():
        for taker in start._takers.values():
            taker._send = lambda _peer, _frame: True
    hurry(exchange)


def hurry(exchange: Exchange) -> None:
    """Wait only briefly for rows."""
    for way in exchange._ways.values():
        assert isinstance(way.source, RemoteHost)
        way.source._patience = msgspec.structs.replace(way.source._patience, silence_s=1.0)


def ends_of_way(hosts: Hosts) -> tuple[Stream, Stream]:
    """Return the streams at the two ends: the encoder's, from now on in pieces of two rows, and the reader's."""
    (taker,) = (t for one in starts_on(hosts, "far") for t in one._takers.values())
    (source,) = (s for one in starts_on(hosts, "farther") for s in one._sources.values())
    taker._stream._piece_bytes = 2 * 16
    return taker._stream, source._stream


def starts_on(hosts: Hosts, name: str) -> list[HostedStart]:
    return [*hosts.running[name].server._starts.values()]


def cut_half_way(exchange: Exchange, hosts: Hosts) -> None:
    """The connection ends when the reader has a third of the rows."""
    del exchange
    _, reader = ends_of_way(hosts)
    write = reader._write

    def first(message: Write) -> None:
        write(message)
        reader._write = lambda _message: reader.fail("closed the connection")

    reader._write = first


def silence_half_way(exchange: Exchange, hosts: Hosts) -> None:
    """A third of the rows arrives, and then nothing, though the connection stands."""
    source, _ = ends_of_way(hosts)
    send = source._send

    def first(frame: bytes) -> bool:
        if b"Write" in frame:
            source._send = lambda _frame: True
        return send(frame)

    source._send = first
    hurry(exchange)


@pytest.mark.parametrize("strike", [cut_at_source, silence_source, cut_half_way, silence_half_way])
async def test_direct_way_that_breaks_costs_no_group_and_no_token(
    place: Place, strike: Callable[[Exchange, Hosts], None]
) -> None:
    """Both streams to the engine live on, and rows are sent through it."""
    async with hosts_of("far", "farther") as hosts:
        exchange = hosts.launcher(place, encode=["far"], generate=["farther"]).exchange
        async with shell_of(place) as shell:
            await reach(shell, exchange)
            strike(exchange, hosts)
            await ask(shell, "second", b"second")
            assert exchange.bytes_direct == 0
            assert shell.healthy
            assert not any(row["losses"] for row in shell.groups())


async def test_direct_rows_may_come_for_a_request_that_was_aborted(place: Place) -> None:
    """In the middle of the transfer: it continues, and other requests use the same image, and another one."""
    async with hosts_of("far", "farther") as hosts:
        exchange = hosts.launcher(place, encode=["far"], generate=["farther"]).exchange
        async with shell_of(place) as shell:
            await reach(shell, exchange)
            _, reader = ends_of_way(hosts)
            write = reader._write
            stream = generate(
                shell, make_request("gone", [14, 15], [(1, 6, b"second")]), max_tokens=10
            )

            def first(message: Write) -> None:
                reader._write = write
                write(message)
                stream.abort()

            reader._write = first
            assert await read(stream) == []
            assert stream.reason == "abort"
            await ask(shell, "second", b"second")
            await ask(shell, "third", b"third")
            assert exchange.bytes_direct >= 2 * 6 * 16
            assert shell.healthy
            assert not any(row["losses"] for row in shell.groups())
            shell._kernel.check_invariants()
            finished = shell.statistics()["finished"]
            assert (finished["length"], finished["abort"]) == (3, 1)


async def test_direct_rows_are_fetched_for_a_replica_that_comes_later(place: Place) -> None:
    """An image that another replica's request was encoded for goes through the engine to the next one."""
    async with hosts_of("far", "farther", "farthest") as hosts:
        launcher = hosts.launcher(place, encode=["far"], generate=["farther", "farthest"])
        async with shell_of(place, groups=THREE) as shell:
            for index in range(6):
                await ask(shell, f"r{index}", b"first" if index % 2 else b"other")
            assert shell.healthy
            assert not any(row["losses"] for row in shell.groups())
            assert launcher.exchange.direct


@pytest.mark.parametrize("lost", [["far"], ["farther"], ["far", "farther"]])
async def test_direct_rows_that_went_with_hosts_are_made_again(
    place: Place, lost: list[str]
) -> None:
    """The host of the encoder, or of the reader, is lost in mid-stream: the stream resumes with its tokens."""
    async with hosts_of("far", "farther") as hosts:
        exchange = hosts.launcher(place, encode=["far"], generate=["farther"]).exchange
        async with shell_of(place, behaviour=Behaviour(step_s=0.004)) as shell:
            await reach(shell, exchange)
            request = make_request("long", [14, 15], [(1, 6, b"second")])
            stream = generate(shell, request, max_tokens=100)
            before = await read(stream, at_least=20)
            assert exchange.bytes_direct == 6 * 16
            for name in lost:
                await hosts.running.pop(name).close()
            await until(lambda: not shell.healthy, "the loss is detected")
            for name in lost:
                hosts.start(name)
            assert before + await read(stream) == expected_tokens(request.prompt_token_ids, 100)
            await ask(shell, "again", b"second")
