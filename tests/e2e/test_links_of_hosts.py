"""Slow links to hosts cost time only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cable import Cable, Wire
from tests.e2e.asking import Ask, choices, drawn_image
from tests.e2e.conftest import assert_idle
from tests.e2e.elsewhere import ASKS, SILENCE_S, engine_on, losses, new_key
from tests.host_process import HostProcess, running
from tests.patience import PATIENCE_S, patience
from vsched import Config, Engine

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(5 * PATIENCE_S),
    pytest.mark.slow,
    pytest.mark.thorough,  # tests/sim/test_hosts.py has the same in virtual time
]
SLOW_BYTES_PER_S = 1e6
MANY = 24
"""Large images: a batch of nearly all of them, of 0.6 MB each, takes longer than the silence deadline."""


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

    Every token is the token of one host.
    """
    asks = [*(large(seed) for seed in range(20, 20 + MANY)), *ASKS]
    here = [one.token_ids for one in await choices(engine, asks, at_once=8)]
    out, back = Wire(SLOW_BYTES_PER_S), Wire(SLOW_BYTES_PER_S)
    near, far = (Cable(host.address, out=(out,), back=(back,), latency_s=0.02) for host in hosts)
    key = hosts[0].key
    together = (f"encode.admission.max_items={MANY}", f"encode.admission.max_tokens={MANY * 256}")
    async with (
        near,
        far,
        engine_on(configure, key, near.address, far.address, *together) as there,
    ):
        async with patience(3 * PATIENCE_S):
            found = [one.token_ids for one in await choices(there, asks, at_once=MANY)]
        assert found == here
        assert out.carried > SILENCE_S * SLOW_BYTES_PER_S
        assert losses(there) == {"encode": {}, "generate": {}}
        await assert_idle(there)
