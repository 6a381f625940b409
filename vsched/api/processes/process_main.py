"""An API process: `python -m vsched.api.processes.process_main LINK`, started by an engine and never by hand."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys

import msgspec
import uvloop
from setproctitle import setproctitle

from vsched.api.app import create_frontend
from vsched.api.http_server import favour_event_loop, forgo_models, http_server
from vsched.api.metrics import ApiMetrics
from vsched.api.processes.link import BEAT_S, SILENT_S, Link, read_order
from vsched.api.processes.messages import (
    EngineMessages,
    MetricsReport,
    Order,
    ProcessLoaded,
    bodies_bytes,
)
from vsched.api.processes.remote_engine import ForwardToEngine, ProcessOutbox, RemoteEngine
from vsched.api.tracing import open_tracing
from vsched.errors import VschedError
from vsched.logs import configure_logging

logger = logging.getLogger(__name__)
END_S = 3.0
"""Maximum time to finish responses after the engine is gone."""


class ApiProcess:
    """Serves until the engine sends a stop, or is gone."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._over = asyncio.Event()
        waiting_bytes_max = 2 * bodies_bytes(order)
        self._link = Link(
            EngineMessages, self._take, self._on_lost, waiting_bytes_max=waiting_bytes_max
        )
        self._box = ProcessOutbox(self._link)
        self._metrics = ApiMetrics(tenants_max=order.settings.tenants_max)
        self._engine = RemoteEngine(order.config.model.served_name, self._box)
        asking = ForwardToEngine(self._engine.ask)
        self._tracing = open_tracing(order.settings.traces_url)
        app = create_frontend(self._engine, order.settings, self._metrics, asking, self._tracing)
        self._server = http_server(app, order.config)

    def _take(self, turn: EngineMessages) -> None:
        self._engine.take(turn)
        if turn.asks_report:
            self._box.put(MetricsReport(self._metrics.report()))
        if turn.stop:
            self._over.set()

    def _on_lost(self, why: str) -> None:
        self._engine.lose(f"the engine {why}")
        self._over.set()

    async def serve(self, end: socket.socket) -> None:
        """Serve over this end of the link.

        Blocks: until the engine sends a stop or is gone, and then for at most `END_S`.
        """
        await self._link.open(end)
        beating, working = (asyncio.create_task(one) for one in (self._beat(), self._work()))
        over = asyncio.create_task(self._over.wait())
        await asyncio.wait([beating, working, over], return_when=asyncio.FIRST_COMPLETED)
        beating.cancel()
        self._server.should_exit = True
        if self._engine.state == "loading":
            working.cancel()
        await asyncio.wait([working], timeout=END_S)
        if self._tracing is not None:
            await self._tracing.close()
        self._link.close()

    async def _work(self) -> None:
        """Load and serve."""
        listener = socket.socket(fileno=self._order.listener)
        serving = self._server.serve(sockets=[listener])
        try:
            if self._order.at_once:
                async with asyncio.TaskGroup() as group:
                    group.create_task(serving)
                    await self._load()
            else:
                await self._load()
                await serving
        except* Exception as errors:
            first = errors.exceptions[0]
            if not isinstance(first, VschedError):
                logger.exception("this process cannot serve")
            self._box.put(ProcessLoaded(str(first) or repr(first)))
            self._box.flush()

    async def _load(self) -> None:
        await self._engine.load()
        favour_event_loop()
        self._box.put(ProcessLoaded())

    async def _beat(self) -> None:
        """Send metrics regularly, and drop the engine if it is silent."""
        while True:
            self._box.put(MetricsReport(self._metrics.report()))
            await asyncio.sleep(BEAT_S)
            if self._link.silent_s() > SILENT_S:
                self._link.lose(f"has said nothing for {SILENT_S:g} s")


def main() -> int:
    """Read the order and serve."""
    end = socket.socket(fileno=int(sys.argv[1]))
    order = msgspec.msgpack.decode(read_order(end), type=Order)
    setproctitle(f"vsched: api {order.index}")
    configure_logging(f"api {order.index}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the engine drains, and sends a stop
    forgo_models(order.config)

    async def run() -> None:
        await ApiProcess(order).serve(end)

    uvloop.run(run())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # do not wait for threads that load or tokenize


if __name__ == "__main__":
    sys.exit(main())
