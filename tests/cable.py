"""A TCP proxy between an engine and a host, which can drop bytes silently."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

PIECE_BYTES = 1 << 15


class Cable:
    """A cable to an address, with a listening address of its own.

    Attributes:
        address: Its near end.
        read: Bytes sent through it, if it is not None.
    """

    def __init__(self, there: str) -> None:
        self.address = ""
        self.read: bytearray | None = None
        self._ip, _, port = there.removeprefix("tcp://").rpartition(":")
        self._port = int(port)
        self._plugged = asyncio.Event()
        self._plugged.set()
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
        await self._plugged.wait()  # like a handshake of TCP, which is repeated
        try:
            further, there = await asyncio.open_connection(self._ip, self._port)
        except OSError:
            writer.close()
            return
        self._writers += [there, writer]
        for source, sink in ((reader, there), (further, writer)):
            self._tasks.add(asyncio.create_task(self._carry(source, sink)))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        pulled = False  # a connection that lost bytes is lost
        with contextlib.suppress(OSError):
            while data := await source.read(PIECE_BYTES):
                pulled = pulled or not self._plugged.is_set()
                if pulled:
                    continue
                if self.read is not None:
                    self.read += data
                sink.write(data)
                await sink.drain()
            if not pulled and self._plugged.is_set():
                sink.write_eof()

    def pull(self) -> None:
        """Drop bytes from now on."""
        self._plugged.clear()

    def plug_in(self) -> None:
        """Let new connections through."""
        self._plugged.set()
