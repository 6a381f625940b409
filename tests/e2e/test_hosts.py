"""A real model whose ranks run on other hosts, which are processes at addresses of this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.asking import Ask, choices, drawn_image
from tests.e2e.losing import check_stream_outlives_host
from tests.host_process import HostProcess, running
from tests.patience import PATIENCE_S
from vsched import Config, Engine
from vsched.aio.hosts.link import write_key_file

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(5 * PATIENCE_S),
    pytest.mark.slow,
]
ASKS = [
    Ask("What is in the image?", [drawn_image(1)]),
    Ask("What differs?", [drawn_image(2), drawn_image(3, (140, 100))], count=40),
    Ask("0 1 2 3 4 5"),
]
LONG = Ask("Describe the picture.", [drawn_image(4)], count=400)


async def test_hosts_answer_as_one_host_and_streams_outlive_a_loss(
    configure: Callable[..., Config], engine: Engine, tmp_path: Path
) -> None:
    """The tokens of one host, with images; and the tokens of a stream whose host is killed in the middle of it.

    Silence is in `tests/unit/rank/test_hosts.py`.
    """
    here = [one.token_ids for one in await choices(engine, [*ASKS, LONG], at_once=4)]
    key = tmp_path / "hosts.key"
    write_key_file(key)
    near, far = HostProcess("near", "127.0.0.1", key), HostProcess("far", "127.0.0.2", key)
    config = configure(
        "nano25",
        f'cluster.hosts={{near = "{near.address}", far = "{far.address}"}}',
        f"cluster.key_file={key}",
        'cluster.encode=["near"]',
        'cluster.generate=["far"]',
        f"cluster.connect_s={PATIENCE_S}",
        "deadlines.rank_timeout_s=10",
    )
    with running(near, far):
        async with Engine(config) as there:
            found = [one.token_ids for one in await choices(there, ASKS, at_once=3)]
            assert found == here[:-1]
            asks = list(zip(ASKS, here, strict=False))
            await check_stream_outlives_host(
                there, (LONG, here[-1]), asks, strike=far.kill, mend=far.start
            )
