"""Starts the API processes, monitors them, restarts those that die, and stops them with the engine."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from typing import Any

import msgspec

from vsched.api.app import create_operations, engine_metrics
from vsched.api.contract import ApiSettings
from vsched.api.http_server import another
from vsched.api.metrics.requests import Report, added
from vsched.api.processes.link import BEAT_S, SILENT_S, Link, framed
from vsched.api.processes.messages import (
    MetricsReport,
    Order,
    ProcessLoaded,
    ProcessMessage,
    Served,
    bodies_bytes,
)
from vsched.api.processes.process_session import EngineOutbox, ProcessSession
from vsched.engine import Engine
from vsched.errors import ConfigError

logger = logging.getLogger(__name__)
PAUSE_S, PAUSE_MAX_S = 0.2, 10.0
"""Pause before a process is restarted: doubled each time, up to the maximum."""
STEADY_S = 30.0
"""After this lifetime, the pause starts at its minimum again."""
FACTS_S = 0.1
"""Maximum age of the engine state in API processes."""
REPORT_S = 1.0
"""Maximum wait for the metrics of a process; after it, the last ones are used."""
END_S = 5.0
_COMMAND = ("-m", "vsched.api.processes.process_main")


class _Process:
    """One process, from start to end."""

    def __init__(self, order: Order, kept: socket.socket, engine: Engine, operations: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[str] = self._loop.create_future()
        self.ended = asyncio.Event()
        self.began_s = self._loop.time()
        self.report = Report()
        self._report_waiters: list[asyncio.Future[None]] = []
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, another(kept) as listener:
            order = msgspec.structs.replace(order, listener=listener.fileno())
            self.popen = subprocess.Popen(  # noqa: S603 - the command is the engine's own
                [sys.executable, *_COMMAND, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), listener.fileno()),
                start_new_session=True,  # Ctrl-C in a terminal must reach only the engine
            )
        self._ours.sendall(framed(msgspec.msgpack.encode(order)))
        self.link = Link(
            list[ProcessMessage],
            lambda messages: self.session.take(messages),
            self._on_lost,
            frame_bytes_max=bodies_bytes(order),
        )
        self.box = EngineOutbox(self.link)
        self.session = ProcessSession(
            engine, self.box, operations=operations, on_life=self._on_life
        )

    async def open(self) -> None:
        await self.link.open(self._ours)

    def _on_life(self, message: ProcessLoaded | MetricsReport) -> None:
        if isinstance(message, ProcessLoaded):
            self._on_loaded(message.error)
            return
        self.report = message.report
        waiters, self._report_waiters = self._report_waiters, []
        for future in waiters:
            if not future.done():
                future.set_result(None)

    def _on_loaded(self, error: str) -> None:
        if not self.loaded.done():
            self.loaded.set_result(error)

    def _on_lost(self, why: str) -> None:
        self._on_loaded(f"process {self.popen.pid} {why} before it had loaded")
        self.session.close()
        self.popen.kill()
        for future in self._report_waiters:
            future.cancel()
        self.ended.set()

    async def ask_report(self) -> None:
        """Update the report.

        Blocks: for at most `REPORT_S`.
        """
        future: asyncio.Future[None] = self._loop.create_future()
        self._report_waiters.append(future)
        self.box.turn.asks_report = True
        await asyncio.wait([future], timeout=REPORT_S)

    async def reap(self) -> int:
        return await asyncio.to_thread(self.popen.wait)


class ApiProcesses:
    """All API processes, on one address: each has its own socket, and the system distributes connections."""

    def __init__(self, engine: Engine, settings: ApiSettings, kept: socket.socket) -> None:
        """Use an engine that has not started, and the socket that reserves the address."""
        self._engine = engine
        self._kept = kept
        count = engine.config.server.processes
        self._settings = share_of(settings, count)
        self._metrics = engine_metrics(engine, settings)
        self._metrics.reports = lambda: [
            self._gone,
            *(one.report for one in self._running.values()),
        ]
        self._operate = create_operations(engine, settings, self._metrics)
        self._gone = Report()
        self._running: dict[int, _Process] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._served: Served | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids of the running ones."""
        return [one.popen.pid for one in self._running.values() if not one.ended.is_set()]

    async def begin(self) -> None:
        """Start all processes; they answer 503 until `ready`."""
        for index in range(self._engine.config.server.processes):
            await self._start(index, at_once=True)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._watch(index)) for index in self._running]
        self._tasks.append(loop.create_task(self._send_beats()))

    async def ready(self) -> None:
        """Send the served model to all processes, and wait until they accept requests.

        Blocks: up to `deadlines.ready_s`.

        Raises:
            ConfigError: If one cannot serve.
        """
        engine = self._engine
        self._served = Served(engine.config, engine.info)
        running = list(self._running.values())
        for one in running:
            one.box.turn.served = self._served
            one.session.send_status()
        async with asyncio.timeout(engine.config.deadlines.ready_s):
            errors = await asyncio.gather(*(asyncio.shield(one.loaded) for one in running))
        for error in filter(None, errors):
            raise ConfigError(f"server.processes: an API process cannot serve: {error}")

    async def _start(self, index: int, *, at_once: bool) -> None:
        config = self._engine.config
        share = -(-config.server.max_connections // config.server.processes)
        server = msgspec.structs.replace(config.server, max_connections=share)
        order = Order(
            index=index,
            config=msgspec.structs.replace(config, server=server),
            settings=self._settings,
            listener=0,
            at_once=at_once,
        )
        one = self._running[index] = _Process(order, self._kept, self._engine, self._operations)
        await one.open()
        if self._served is not None:
            one.box.turn.served = self._served
        one.session.send_status()

    async def _operations(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve operator requests, with up-to-date metrics of all processes."""
        running = [one for one in self._running.values() if not one.ended.is_set()]
        await asyncio.gather(*(one.ask_report() for one in running))
        await self._operate(scope, receive, send)
        for one in running:
            one.session.send_status()

    async def _watch(self, index: int) -> None:
        """Restart a process whenever it dies."""
        pause_s = PAUSE_S
        loop = asyncio.get_running_loop()
        while True:
            one = self._running[index]
            await one.ended.wait()
            code = await one.reap()
            self._gone = Report(0, added([self._gone, one.report]))
            one.report = Report()
            if loop.time() - one.began_s > STEADY_S:
                pause_s = PAUSE_S
            logger.warning("API process %d ended (exit code %d); restarting it", index, code)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
            await self._start(index, at_once=False)

    async def _send_beats(self) -> None:
        """Send state and signs of life to the processes; drop silent ones."""
        since_beat_s = 0.0
        while True:
            await asyncio.sleep(FACTS_S)
            since_beat_s += FACTS_S
            for one in self._running.values():
                if one.ended.is_set():
                    continue
                one.session.send_status()
                if one.link.silent_s() > SILENT_S:
                    one.link.lose(f"has said nothing for {SILENT_S:g} s")
                elif since_beat_s >= BEAT_S:
                    _ = one.box.turn  # an empty message
            if since_beat_s >= BEAT_S:
                since_beat_s = 0.0

    async def stop(self) -> None:
        """Stop all processes; responses are sent to the end.

        Blocks: for at most `END_S`, after which they are killed.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        running = [one for one in self._running.values() if not one.ended.is_set()]
        for one in running:
            one.box.turn.stop = True
        ends = [asyncio.create_task(one.ended.wait()) for one in running]
        if ends:
            _, late = await asyncio.wait(ends, timeout=END_S)
            if late:
                logger.warning("%d API processes did not end in %g s: killed", len(late), END_S)
        for one in self._running.values():
            one.link.lose("is to end")
            await one.reap()


def share_of(settings: ApiSettings, processes: int) -> ApiSettings:
    """Settings of one process; limits on totals are divided between the processes."""
    share = -(-settings.bodies_bytes_max // processes)
    return msgspec.structs.replace(settings, bodies_bytes_max=share)
