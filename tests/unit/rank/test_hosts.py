"""Ranks on other hosts: the same tokens, and no request lost with a host."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
import pytest

from tests.patience import until
from tests.unit.rank.fake_plugin import Behaviour, expected_tokens
from tests.unit.rank.hosts import PATIENT, cable_to, host_process, hosts_of
from tests.unit.rank.worker_groups import Place, generate, read, shell_of
from vsched.aio.shell import Shell
from vsched.errors import GroupLostError, StartFailedError
from vsched.testing import make_request

pytestmark = pytest.mark.slow
TOGETHER = (("encode", "generate"),)
TWO_OF_EACH = (("encode-0",), ("encode-1",), ("generate-0",), ("generate-1",))


@pytest.mark.parametrize(
    ("groups", "encode", "generators", "ranks"),
    [
        pytest.param(TWO_OF_EACH, ["local", "far"], ["far", "farther"], 1, id="apart"),
        pytest.param(TOGETHER, [], ["far"], 2, id="together", marks=pytest.mark.thorough),
    ],
)
async def test_hosts_yield_the_tokens_of_one_host(
    place: Place,
    groups: Sequence[Sequence[str]],
    encode: list[str],
    generators: list[str],
    ranks: int,
) -> None:
    """A step finds its embeddings, on whichever host they were computed."""
    async with hosts_of("far", "farther") as hosts:
        hosts.launcher(place, encode=encode, generate=generators)
        async with shell_of(place, groups=groups, ranks=ranks) as shell:
            requests = [
                make_request("text", [11, 12, 13]),
                make_request("image", [14, 15], [(1, 6, b"image1")]),
                make_request("two images", [16] * 20, [(3, 5, b"image2"), (9, 6, b"image1")]),
            ]
            streams = [generate(shell, request, max_tokens=40) for request in requests]
            found = await asyncio.gather(*map(read, streams))
            for request, tokens in zip(requests, found, strict=True):
                assert tokens == expected_tokens(request.prompt_token_ids, 40)
        assert not any(host.server.pids for host in hosts.running.values())


QUICK = msgspec.structs.replace(PATIENT, rank_timeout_s=2.0)
"""Detects a silent host within the patience of a test, but not a live one on a busy machine."""


async def check_stream_goes_on(
    shell: Shell,
    strike: Callable[[], object],
    noticed: Callable[[], object],
    mend: Callable[[], object],
) -> None:
    """Cause a fault in mid-stream, repair it once it was noticed, and read the rest."""
    request = make_request("image", [14, 15], [(1, 6, b"image1")])
    stream = generate(shell, request, max_tokens=200)
    before = await read(stream, at_least=20)
    strike()
    await until(lambda: not shell.healthy and noticed(), "the loss is detected")
    late = generate(shell, make_request("late", [30, 31], [(0, 5, b"other")]), max_tokens=5)
    mend()
    assert before + await read(stream) == expected_tokens(request.prompt_token_ids, 200)
    assert await read(late) == expected_tokens([5] * 5 + [30, 31], 5)
    assert shell.healthy
    assert shell.statistics()["finished"]["length"] == 2


async def test_hosts_stream_goes_on_when_a_host_is_killed_and_comes_back(place: Place) -> None:
    """SIGKILL: its connection breaks, its ranks end with it, and it is waited for."""
    async with hosts_of() as hosts:
        with host_process(hosts) as process:
            hosts.launcher(place, generate=["far"])
            async with shell_of(place, behaviour=Behaviour(step_s=0.004)) as shell:
                await check_stream_goes_on(shell, process.kill, lambda: True, process.start)
                (row,) = (row for row in shell.group_rows() if row["name"] == "generate")
                assert row["losses"] == {"HostLost": 1}
                assert "host far" in row["last_loss"]["reason"]


@pytest.mark.thorough
async def test_hosts_stream_goes_on_when_a_cable_is_pulled(place: Place) -> None:
    """A half-open connection: both sides detect it, and the host's ranks end without the engine."""
    async with hosts_of("far") as hosts, cable_to(hosts, "far") as cable:
        hosts.launcher(place, encode=["far"], generate=["far"], deadlines=QUICK)
        host = hosts.running["far"]
        async with shell_of(place, behaviour=Behaviour(step_s=0.004)) as shell:
            await check_stream_goes_on(
                shell, cable.pull, lambda: not host.server.pids, cable.plug_in
            )


async def test_hosts_first_start_fails_without_its_host(place: Place) -> None:
    """A missing host is an error at once, without waiting."""
    async with hosts_of("far") as hosts:
        await hosts.running.pop("far").close()
        hosts.launcher(place, generate=["far"], open_s=0.1)
        with pytest.raises((GroupLostError, StartFailedError), match="host far .*did not answer"):
            async with shell_of(place):
                pass
