"""Ranks forked by a fork server: equivalent to new processes, and independent of the server's fate."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.patience import until
from tests.unit.rank.fake_plugin import NAME, Behaviour
from tests.unit.rank.test_worker_group import one_request, process_names
from tests.unit.rank.worker_groups import Place, Received, is_running, started
from vsched import fork_server
from vsched.aio import launcher
from vsched.aio.launcher import LocalLauncher, early_fork_servers
from vsched.config import load_config
from vsched.fork_server import ForkServer

pytestmark = pytest.mark.slow
FORKED = Behaviour(forkable=("tests.unit.rank.fake_plugin",))


def the_server(place: Place) -> ForkServer:
    """Return the fork server of a place that has one."""
    assert isinstance(place.launcher, LocalLauncher)
    (server,) = place.launcher._fork_servers.values()
    return server


def parent_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/stat").read_text()
    return int(status.rpartition(")")[2].split()[1])


def children() -> set[str]:
    """Ids of this process's children, including those not yet reaped."""
    threads = Path("/proc/self/task").iterdir()
    return {pid for thread in threads for pid in (thread / "children").read_text().split()}


@pytest.fixture(autouse=True)
def no_child_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Assert that every rank is reaped; this process adopts orphans during a test only.

    End-to-end tests in the same process share one fork server and keep engines; neither is meant here.
    """
    monkeypatch.setattr(launcher, "ForkServer", ForkServer)
    before = children()
    yield
    assert children() <= before
    assert fork_server._adopting == 0


async def test_forked_ranks_are_as_new_processes_are(place: Place) -> None:
    """Children of the engine in sessions of their own, with process names; a killed one is reported and replaced."""
    received = Received()
    worker_group = place.worker_group(received.events, ranks=2, behaviour=FORKED)
    await worker_group.start()
    pids, server = worker_group.pids, the_server(place).pid
    assert process_names(server)[1] == "vsched: fork server"
    assert [parent_of(pid) for pid in pids] == [os.getpid()] * 2
    assert [os.getsid(pid) for pid in pids] == pids
    assert [process_names(pid)[1] for pid in pids] == [
        "vsched: generate rank 0",
        "vsched: generate rank 1",
    ]
    os.kill(pids[1], signal.SIGKILL)
    await received.wait_until(lambda: received.lost)
    assert received.lost == [(["generate"], "generate: rank 1 was killed by SIGKILL")]
    await worker_group.stop(grace_s=0)
    assert not any(is_running(pid) for pid in pids)
    resource.prlimit(server, resource.RLIMIT_NOFILE, (400, 400))
    await worker_group.start()
    worker_group.leader("generate").decide(one_request())
    await received.wait_until(lambda: received.results)
    assert the_server(place).pid == server, "it has forked these, too"
    await worker_group.stop()
    place.launcher.close()
    assert not is_running(server)


async def test_fork_server_that_was_begun_early_is_taken_over(tmp_path: Path) -> None:
    """It imports before there is a launcher, forks the ranks, and ends with its context."""
    path = msgspec.json.encode(FORKED).decode()
    sets = [f"model.path={path}", f"generate.plugin={NAME}"]
    with early_fork_servers(load_config(None, sets=sets, environ={}).config) as started:
        (server,) = started.values()
        early = server.pid
        assert is_running(early)
        place = Place(tmp_path, LocalLauncher(str(tmp_path), started=started))
        worker_group = place.worker_group(Received().events, behaviour=FORKED)
        await worker_group.start()
        assert the_server(place) is server
        assert (server.pid, parent_of(*worker_group.pids)) == (early, os.getpid())
        assert process_names(early)[1] == "vsched: fork server"
        await worker_group.stop()
        place.launcher.close()
    assert not is_running(early)
    assert server.pid == 0


@pytest.mark.parametrize(
    "sets",
    [
        [],
        ["model.path=nowhere"],
        [f"model.path={msgspec.json.encode(FORKED).decode()}", "generate.device=cuda"],
        [f"model.path={msgspec.json.encode(Behaviour()).decode()}"],
    ],
)
def test_fork_server_is_not_begun_if_ranks_cannot_be_forked(sets: list[str]) -> None:
    """Without a checkpoint, on a GPU, or if a plug-in does not allow it; the engine reports the error."""
    sets = [*sets, f"generate.plugin={NAME if '{' in str(sets) else 'transformers'}"]
    with early_fork_servers(load_config(None, sets=sets, environ={}).config) as started:
        assert started == {}


async def test_fork_server_that_dies_is_replaced_and_takes_no_rank_along(place: Place) -> None:
    async with started(place, behaviour=FORKED) as (worker_group, received):
        server = the_server(place)
        killed = server.pid
        os.kill(killed, signal.SIGKILL)
        worker_group.leader("generate").decide(one_request())
        await received.wait_until(lambda: received.results)
        await worker_group.stop()
        await worker_group.start()
        assert server.pid not in (0, killed)
        assert parent_of(*worker_group.pids) == os.getpid()
        assert received.lost == []


@pytest.mark.thorough
async def test_fork_server_that_hangs_costs_a_deadline(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The rank becomes a new process, and the server is replaced."""
    async with started(place, behaviour=FORKED) as (worker_group, _):
        await worker_group.stop()
        server = the_server(place)
        os.kill(server.pid, signal.SIGSTOP)
        monkeypatch.setattr(fork_server, "FORK_S", 0.01)
        await worker_group.start()
        assert (
            "generate rank 0: a new process instead: the fork server did not answer" in caplog.text
        )
        await until(lambda: not server.pid, "it is killed, and replaced at the next request")


@pytest.mark.parametrize("call", [(ForkServer, "start"), (os, "pidfd_open"), (os, "getcwd")])
async def test_rank_is_a_new_process_if_the_system_refuses_a_call(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: tuple[object, str],
) -> None:
    """As without a free file descriptor, or in a deleted folder; otherwise its group would wait for it in vain."""
    real, errors = getattr(*call), [OSError(errno.EMFILE, "Too many open files")]

    def once(*arguments: object) -> object:
        if errors:
            raise errors.pop()
        return real(*arguments)

    monkeypatch.setattr(*call, once)
    async with started(place, behaviour=FORKED):
        assert "a new process instead: [Errno 24] Too many open files" in caplog.text


@pytest.mark.thorough
async def test_fork_server_starts_with_any_environment(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable may have bytes that are not UTF-8, and all together may be larger than a message."""
    monkeypatch.setenv("NO_TEXT", "\udcff")
    for index in range(4):
        monkeypatch.setenv(f"LARGE_{index}", "x" * (1 << 16))
    async with started(place, behaviour=FORKED):
        assert the_server(place).pid


@pytest.mark.parametrize(
    ("module", "said"),
    [
        pytest.param(
            *("tests.unit.rank.no_such_module", "ModuleNotFoundError"), marks=pytest.mark.thorough
        ),
        ("tests.unit.rank.thread_at_import", "starts threads when it is imported"),
    ],
)
async def test_ranks_are_new_processes_if_nothing_can_be_forked(
    module: str, said: str, place: Place, capfd: pytest.CaptureFixture[str]
) -> None:
    behaviour = Behaviour(forkable=(module,))
    async with started(place, behaviour=behaviour) as (worker_group, received):
        assert said in capfd.readouterr().err
        worker_group.leader("generate").decide(one_request())
        await received.wait_until(lambda: received.results)
        await until(lambda: the_server(place).pid == 0, "the end of the server is seen")


async def test_start_that_is_given_up_waits_for_no_imports(place: Place) -> None:
    """No rank was forked yet, and none will be."""
    worker_group = place.worker_group(Received().events, behaviour=FORKED)
    starting = asyncio.ensure_future(worker_group.start())
    assert isinstance(place.launcher, LocalLauncher)
    servers = place.launcher._fork_servers
    await until(lambda: servers and the_server(place).pid)  # 0 would stop the tests themselves
    os.kill(the_server(place).pid, signal.SIGSTOP)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await worker_group.stop(grace_s=0)
    assert worker_group.pids == []
