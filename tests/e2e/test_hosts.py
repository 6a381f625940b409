"""A real model whose ranks run on other hosts, which are processes at addresses of this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.losing import check_host_loss
from tests.host_process import HostProcess, running
from tests.patience import PATIENCE_S
from vsched import Config, Engine
from vsched.aio.hosts.link import write_key_file

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(5 * PATIENCE_S),
    pytest.mark.slow,
    pytest.mark.thorough,  # `tests/unit/rank/test_hosts.py` loses such hosts in every way
]


async def test_hosts_answer_as_one_host_and_streams_outlive_a_loss(
    configure: Callable[..., Config], engine: Engine, tmp_path: Path
) -> None:
    """The host of the generate stage is killed; silent losses are in `tests/unit/rank/test_hosts.py`."""
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
        # Far below the deadline of a test, and far above the pauses of a live process.
        "deadlines.rank_timeout_s=10",
    )
    with running(near, far):
        await check_host_loss(engine, config, strike=far.kill, mend=far.start)
