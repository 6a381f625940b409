"""An API process's engine and the engine's session, joined without sockets, over a real shell and simulated ranks."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.unit.aio.ranks import ShellHarness
from tests.unit.media.fakes import FakePreprocessor, model_info
from vsched.aio.streams import OutputDelta, TokenStream
from vsched.api.app import create_operations
from vsched.api.contract import ApiSettings
from vsched.api.metrics import ApiMetrics
from vsched.api.processes import process_main as remote_engine_module
from vsched.api.processes.link import Link
from vsched.api.processes.process_main import RemoteEngine
from vsched.api.processes.supervisor import ProcessSession
from vsched.config import Config, MediaConfig
from vsched.engine import Engine
from vsched.media import MediaPipeline, PixelStore

PREPARING_MAX = 2


class Wire(Link):
    """Stands for both ends of a link in one direction: frames are delivered, unless the wire is held or cut."""

    def __init__(self) -> None:
        super().__init__(on_lost=lambda _: None)
        self.sent: list[Any] = []
        self.held = False
        self.cut = False
        self._waiting: list[bytes] = []

    def _send(self, frame: bytes) -> None:
        if self.cut:
            return
        self.sent += msgspec.msgpack.decode(frame)
        if self.held:
            self._waiting.append(frame)
        else:
            self.receive(frame)

    def let_go(self) -> None:
        self.held = False
        waiting, self._waiting = self._waiting, []
        for frame in waiting:
            self.receive(frame)


class Joined:
    """One API process and its engine.

    Attributes:
        up: From the process to the engine.
        down: From the engine to the process.
    """

    session: ProcessSession
    remote: RemoteEngine

    def __init__(self, played: ShellHarness) -> None:
        self.played = played
        self.engine: Engine = played.engine()
        self.engine.info = model_info(context_tokens=64)
        self.engine.preprocessor = FakePreprocessor(self.engine.info)
        store = PixelStore(memoryview(bytearray()))
        settings = MediaConfig(preparing_max=PREPARING_MAX)
        assert self.engine._running is not None
        self.media = MediaPipeline(self.engine.preprocessor, store, settings)
        adapters = SimpleNamespace(rows=list)
        self.engine._running = dataclasses.replace(
            self.engine._running, media=self.media, adapters=cast("Any", adapters)
        )
        self.up, self.down = Wire(), Wire()
        operations = create_operations(self.engine, ApiSettings(), ApiMetrics(self.engine))
        self.session = ProcessSession(self.engine, self.down, operations=operations)
        self.remote = RemoteEngine("demo", self.up)
        self.up.receivers, self.down.receivers = (self.session,), (self.remote,)

    async def load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the process load with the engine's facts."""

        def load(*_: object, **__: object) -> tuple[FakePreprocessor, bool]:
            return FakePreprocessor(self.engine.info), False

        monkeypatch.setattr(remote_engine_module, "load_worker", lambda *_, **__: None)
        monkeypatch.setattr(remote_engine_module, "load_front_end", load)
        monkeypatch.setattr(remote_engine_module, "grammar_processes", lambda *_: None)
        self.down.call("served", Config(), self.engine.info)
        self.session.send_status()
        await self.remote.load()

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Number of live requests in the kernel, in the session, and in the process: all 0 in the end."""
        reported = self.played.shell.statistics()
        session = len(self.session._arriving) + len(self.session._live)
        remote = self.remote
        known = len(remote._pending) + len(remote._choices) + len(remote._streams._by_number)
        return reported["running"] + reported["waiting"], session, known

    async def turns(self, count: int = 12) -> None:
        """Let the loop turn a few times: long enough for any message, since all parts share this process."""
        for _ in range(count):
            await asyncio.sleep(0)

    async def read(self, stream: TokenStream) -> list[OutputDelta]:
        """Let the ranks compute, and return the deltas of one choice."""
        reading = asyncio.ensure_future(_deltas(stream))
        for _ in range(1000):
            if reading.done():
                break
            self.played.ranks.run(1)
            await self.turns(3)
        assert reading.done(), "it has no end"
        return await reading


async def _deltas(stream: TokenStream) -> list[OutputDelta]:
    return [delta async for delta in stream]
