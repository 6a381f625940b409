"""What lies between an engine and a host: it can be pulled, and nobody is told."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

PIECE_BYTES = 1 << 16


class Cable:
    """A cable to an address, with an end of its own to connect to.

    Attributes:
        address: Its near end.
    """

    def __init__(self, there: str) -> None:
        self.address = ""
        self._ip, _, port = there.removeprefix("tcp://").rpartition(":")
        self._port = int(port)
        self._plugged = True
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            further, there = await asyncio.open_connection(self._ip, self._port)
        except OSError:
            writer.close()
            return
        self._writers += [there, writer]
        for source, sink in ((reader, there), (further, writer)):
            task = asyncio.get_running_loop().create_task(self._pass_on(source, sink))
            self._tasks.add(task)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        pulled = False  # a connection that lost bytes is lost
        with contextlib.suppress(ConnectionError):
            while data := await source.read(PIECE_BYTES):
                pulled = pulled or not self._plugged
                if not pulled:
                    sink.write(data)
                    await sink.drain()
        if not pulled:
            sink.close()

    def pull(self) -> None:
        """Lose what comes from now on."""
        self._plugged = False

    def plug_in(self) -> None:
        """Let new connections through."""
        self._plugged = True
