"""Restarts of API processes, with processes that the tests stand for."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest

from tests.patience import until
from tests.unit.api.fakes import FakeEngine
from vsched.api import ApiSettings
from vsched.api.http_server import listen
from vsched.api.processes import supervisor
from vsched.api.processes.link import Link
from vsched.api.processes.supervisor import ApiProcesses
from vsched.config import Config, ServerConfig
from vsched.config.sections import DeadlinesConfig
from vsched.errors import ConfigError


class PlayedProcess:
    """Stands for a started process: collects the states that the engine sends."""

    def __init__(self, end: int) -> None:
        self.pid = id(self)
        self.stdin = io.BytesIO()
        self.states: list[str] = []
        self.link = Link(self, on_lost=lambda _: None)
        self._opening = asyncio.ensure_future(self.link.open(socket.socket(fileno=os.dup(end))))

    def on_served(self, config: Any, info: Any) -> None:
        self.link.call("loaded", "")

    def on_status(self, state: str, adapters: list[Any]) -> None:
        self.states.append(state)

    def on_beat(self) -> None:
        pass

    def on_stop(self, within_s: float = 0.0) -> None:
        self.link.close()

    kill = on_stop

    def wait(self) -> int:
        return -9


class Played:
    """All processes, and the number of coming starts that fail."""

    def __init__(self) -> None:
        self.started: list[PlayedProcess] = []
        self.failures = 0

    def start(self, command: list[str], **_: object) -> PlayedProcess:
        if self.failures:
            self.failures -= 1
            raise OSError("too many open files")
        self.started.append(PlayedProcess(int(command[-1])))
        return self.started[-1]


@contextlib.contextmanager
def listening(**deadlines: float) -> Iterator[ApiProcesses]:
    """Two processes of an engine."""
    server = ServerConfig(port=0, processes=2)
    config = Config(server=server, deadlines=DeadlinesConfig(**deadlines))
    engine = cast("Any", FakeEngine())
    engine.config = config
    with contextlib.closing(listen(config)) as kept:
        yield ApiProcesses(engine, ApiSettings(), kept)


@pytest.fixture
async def played(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Played]:
    """Two served processes, whose state is sent as often as the event loop allows."""
    made = Played()
    monkeypatch.setattr(subprocess, "Popen", made.start)
    monkeypatch.setattr(supervisor, "FACTS_S", 0)
    monkeypatch.setattr(supervisor, "PAUSE_S", 0.001)
    with listening() as processes:
        await processes.start_serving()
        await processes.ready()
        yield made
        await processes.stop()


async def test_dead_process_is_started_until_it_is_there_and_has_the_state(played: Played) -> None:
    """Also if it was sent before the link was open: without it, the process would refuse every request."""
    played.failures = 2
    played.started[0].kill()
    await until(lambda: len(played.started) == 3 and bool(played.started[2].states))
    played.started[2].kill()
    await until(lambda: len(played.started) == 4 and bool(played.started[3].states))
    assert [one.states for one in played.started] == [["ready"]] * 4


async def test_process_that_cannot_load_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_for_ever(_: PlayedProcess, config: Any, info: Any) -> None:
        """Take the arguments that the link finds in the signature."""

    monkeypatch.setattr(PlayedProcess, "on_served", load_for_ever)
    monkeypatch.setattr(subprocess, "Popen", Played().start)
    with listening(ready_s=0.01) as processes:
        await processes.start_serving()
        with pytest.raises(ConfigError, match=r"within 0\.01 s \(deadlines\.ready_s\)\. Remedy: "):
            await processes.ready()
        await processes.stop()


async def test_restarted_process_that_cannot_load_is_reported_with_the_reason(
    played: Played, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as after its checkpoint was removed: a process reports that only to the engine."""

    def fail(one: PlayedProcess, config: Any, info: Any) -> None:
        del config, info
        one.link.call("loaded", "there is no checkpoint")
        one.link.close()

    monkeypatch.setattr(PlayedProcess, "on_served", fail)
    played.started[0].kill()
    await until(lambda: "(exit code -9): there is no checkpoint; restarting it" in caplog.text)
