"""A real model whose ranks run on other hosts, which are processes at addresses of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.asking import Answer, Ask, answers, begin, drawn_image
from tests.e2e.conftest import assert_idle
from tests.host_process import HostProcess
from tests.patience import PATIENCE_S, patience, until
from vsched import Config, Engine
from vsched.aio.hosts.keys import write_key_file

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


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[dict[str, HostProcess]]:
    """Yield two hosts, each at an address of its own."""
    key = tmp_path / "hosts.key"
    write_key_file(key)
    running: dict[str, HostProcess] = {}
    try:
        for number, name in enumerate(("near", "far"), start=1):
            running[name] = HostProcess(name, f"127.0.0.{number}", key)
        yield running
    finally:
        for host in running.values():
            host.kill()


async def test_hosts_answer_as_one_host_and_streams_outlive_a_kill(
    configure: Callable[..., Config], engine: Engine, hosts: dict[str, HostProcess]
) -> None:
    """The tokens of one host, with images; and those of a stream whose host is killed in the middle of it."""
    here = [one.token_ids for one in await answers(engine, [*ASKS, LONG], at_once=4)]
    listed = ", ".join(f'{name} = "{host.address}"' for name, host in hosts.items())
    elsewhere = configure(
        "nano25",
        f"cluster.hosts={{{listed}}}",
        f"cluster.key_file={hosts['far'].key}",
        'cluster.encode=["near"]',
        'cluster.generate=["far"]',
        f"cluster.connect_s={PATIENCE_S}",
    )
    async with Engine(elsewhere) as there:
        found = [one.token_ids for one in await answers(there, ASKS, at_once=3)]
        assert found == here[:-1]
        stream = await begin(there, LONG)
        async with patience(3 * PATIENCE_S):
            answer = Answer()
            async for delta in stream:
                answer.deltas.append(delta)
                if len(answer.token_ids) >= 20:
                    break
            assert len(answer.token_ids) < LONG.count
            hosts["far"].kill()
            await until(lambda: there.state != "ready", "the loss is noticed")
            hosts["far"].start()
            answer.deltas += [delta async for delta in stream]
        assert answer.token_ids == here[-1]
        (row,) = (row for row in there.groups() if row["stage"] == "generate")
        assert row["losses"] == {"HostLost": 1}
        await assert_idle(there)
