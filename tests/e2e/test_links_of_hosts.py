"""Slow links between hosts, and failing direct links: only time is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cable import Cable, Wire
from tests.e2e.asking import Ask, answers, begin, drawn_image, read
from tests.e2e.conftest import assert_idle
from tests.e2e.elsewhere import ASKS, SILENCE_S, engine_on, exchange_of, losses, new_key
from tests.host_process import HostProcess, free_port, reached_at, running
from tests.patience import PATIENCE_S, patience, until
from vsched import Config, Engine
from vsched.aio.hosts import exchange as exchange_module
from vsched.aio.hosts.exchange import Exchange

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(5 * PATIENCE_S),
    pytest.mark.slow,
]
SLOW_BYTES_PER_S = 1e6
MANY = 24
"""Large images: a batch of nearly all of them, of 0.6 MB each, takes longer than the silence deadline."""
TRICKLE_BYTES_PER_S = 20_000
"""Slow enough that the rows of a large image, about 65,000 bytes, are in flight for seconds."""
HALF_BYTES = 40_000


def large(seed: int) -> Ask:
    """Ask about an image with many bytes to send."""
    return Ask("What is in the image?", [drawn_image(seed, (448, 448))], count=12)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[HostProcess, HostProcess]]:
    """Yield a host for the encoder, and one that generates."""
    key = new_key(tmp_path)
    started = HostProcess("near", "127.0.0.1", key), HostProcess("far", "127.0.0.2", key)
    with running(*started):
        yield started


async def test_hosts_on_a_slow_link_are_waited_for(
    configure: Callable[..., Config], engine: Engine, hosts: tuple[HostProcess, HostProcess]
) -> None:
    """The pixels of a batch take longer than the silence deadline, and no host is declared dead, nor stops.

    Every token is that of one host.
    """
    asks = [*(large(seed) for seed in range(20, 20 + MANY)), *ASKS]
    here = [one.token_ids for one in await answers(engine, asks, at_once=8)]
    out, back = Wire(SLOW_BYTES_PER_S), Wire(SLOW_BYTES_PER_S)
    near, far = (Cable(host.address, out=(out,), back=(back,), latency_s=0.02) for host in hosts)
    key = hosts[0].key
    together = (f"encode.admission.max_items={MANY}", f"encode.admission.max_tokens={MANY * 256}")
    async with (
        near,
        far,
        engine_on(configure, key, near.address, far.address, *together, direct=False) as there,
    ):
        async with patience(3 * PATIENCE_S):
            found = [one.token_ids for one in await answers(there, asks, at_once=MANY)]
        assert found == here
        assert out.carried > SILENCE_S * SLOW_BYTES_PER_S
        assert losses(there) == {"encode": {}, "generate": {}}
        await assert_idle(there)


async def use_way(engine: Engine, exchange: Exchange, asks: list[Ask]) -> list[list[int]]:
    """Have rows sent directly: the first image goes through the engine; return all answers."""
    first = await answers(engine, asks[:1], at_once=1)
    await until(lambda: exchange._ways and all(way.reached for way in exchange._ways.values()))
    before = exchange.bytes_direct
    others = await answers(engine, asks[1:], at_once=1)
    assert exchange.bytes_direct > before
    return [one.token_ids for one in [*first, *others]]


@pytest.mark.parametrize("lost", ["the reader's host", "the encoder's host", "the way"])
async def test_direct_rows_that_break_off_half_way_come_otherwise(
    configure: Callable[..., Config],
    engine: Engine,
    hosts: tuple[HostProcess, HostProcess],
    monkeypatch: pytest.MonkeyPatch,
    lost: str,
) -> None:
    """While rows are in flight: they go through the engine, or are encoded again, and the direct link is used again."""
    monkeypatch.setattr(exchange_module, "RETRY_S", 0.0)
    asks = [large(seed) for seed in range(40, 45)]
    here = [one.token_ids for one in await answers(engine, asks, at_once=1)]
    near, far = hosts
    rows = Wire()
    way = Cable(near.address, back=(rows,))
    async with (
        way,
        engine_on(configure, near.key, near.address, far.address, direct=True) as there,
    ):
        exchange = exchange_of(there)
        with reached_at({near.address: way.address}):
            assert await use_way(there, exchange, asks[:2]) == here[:2]
            before, came = rows.carried, exchange.bytes_direct
            rows.bytes_per_s = TRICKLE_BYTES_PER_S
            stream = await begin(there, asks[2])
            await until(lambda: rows.carried - before > HALF_BYTES, "rows are in flight")
            assert exchange.bytes_direct == came
            match lost:
                case "the reader's host":
                    far.kill()
                    far.start()
                    expected = {"encode": {}, "generate": {"HostLost": 1}}
                case "the encoder's host":
                    near.kill()
                    near.start()
                    expected = {"encode": {"HostLost": 1}, "generate": {}}
                case _:
                    way.pull()
                    expected = {"encode": {}, "generate": {}}
            async with patience(2 * PATIENCE_S):
                assert (await read(stream)).token_ids == here[2]
            assert exchange.bytes_direct == came
            assert losses(there) == expected
            rows.bytes_per_s = 0.0
            way.plug_in()
            assert await use_way(there, exchange, asks[3:]) == here[3:]
            assert losses(there) == expected
        await assert_idle(there)


async def test_direct_way_that_nobody_finds_costs_no_group(
    configure: Callable[..., Config], engine: Engine, hosts: tuple[HostProcess, HostProcess]
) -> None:
    """Hosts that cannot reach each other, while the engine reaches both: rows go through it."""
    here = [one.token_ids for one in await answers(engine, ASKS, at_once=1)]
    near, far = hosts
    async with engine_on(configure, near.key, near.address, far.address, direct=True) as there:
        exchange = exchange_of(there)
        with reached_at({near.address: f"tcp://127.0.0.3:{free_port('127.0.0.3')}"}):
            for ask, tokens in zip(ASKS, here, strict=True):
                (found,) = await answers(there, [ask], at_once=1)
                assert found.token_ids == tokens
            await until(lambda: not exchange._ways, "the direct link is given up")
        assert exchange.bytes_direct == 0
        assert losses(there) == {"encode": {}, "generate": {}}
        await assert_idle(there)
