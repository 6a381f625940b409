"""A real model whose ranks run on other hosts, which are processes at addresses of this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.asking import Ask, choices, drawn_image
from tests.e2e.elsewhere import ASKS, engine_on, new_key
from tests.e2e.losing import check_stream_outlives_host
from tests.host_process import HostProcess, running
from tests.network import FAR, network, why_no_network
from tests.patience import PATIENCE_S
from vsched import Config, Engine

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(5 * PATIENCE_S),
    pytest.mark.slow,
]
LONG = Ask("Describe the picture.", [drawn_image(4)], count=400)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """Return a file with the secret of engine and hosts."""
    return new_key(tmp_path)


@pytest_asyncio.fixture(loop_scope="package")
async def struck(
    request: pytest.FixtureRequest, key: Path
) -> AsyncIterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    """Yield the address of a host, a function that takes it away from the engine, and one that restores it."""
    with ExitStack() as stack:
        if request.param == "network cut":
            if why := why_no_network():
                pytest.skip(why)
            net = stack.enter_context(network())
            host = HostProcess("far", FAR, key, port=7700, within=net.within)
        else:
            host = HostProcess("far", "127.0.0.2", key)
        stack.enter_context(running(host))
        if request.param == "killed":
            yield host.address, host.kill, host.start
        else:
            yield host.address, net.cut, net.mend


@pytest.mark.parametrize(
    "struck", ["killed", pytest.param("network cut", marks=pytest.mark.thorough)], indirect=True
)
async def test_hosts_answer_as_one_host_and_streams_outlive_a_loss(
    configure: Callable[..., Config],
    engine: Engine,
    key: Path,
    struck: tuple[str, Callable[[], object], Callable[[], object]],
) -> None:
    """The tokens of one host, with images; and the tokens of a stream whose host is lost in the middle of it.

    The host ends, which closes the connection, or is cut off in silence, which only the deadline detects; a host that
    stands still and a pulled cable are in `tests/unit/rank/test_hosts.py`.
    """
    here = [one.token_ids for one in await choices(engine, [*ASKS, LONG], at_once=4)]
    far, strike, mend = struck
    near = HostProcess("near", "127.0.0.1", key)
    with running(near):
        async with engine_on(configure, key, near.address, far) as there:
            found = [one.token_ids for one in await choices(there, ASKS, at_once=3)]
            assert found == here[:-1]
            asks = list(zip(ASKS, here, strict=False))
            await check_stream_outlives_host(
                there, (LONG, here[-1]), asks, strike=strike, mend=mend
            )
