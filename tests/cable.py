"""A TCP proxy between an engine and a host: it can drop bytes silently, and it can be slow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Self

PIECE_BYTES = 1 << 15
PIECES_MAX = 64
"""Maximum pieces in one direction of a connection; the sender then has to wait."""
TICK_S = 0.001
"""Pieces due within this time are sent at once: shorter sleeps are impossible."""
Line = asyncio.Queue[tuple[float, bytes]]


class Wire:
    """One direction of a cable, or of several that share it, with one transfer at a time.

    Attributes:
        bytes_per_s: Its rate; 0 for unlimited.
        carried: Bytes so far.
    """

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self.carried = 0
        self._free_s = 0.0

    def carry(self, size: int, now_s: float) -> float:
        """Count bytes; return the time at which the last of them is through."""
        self.carried += size
        if not self.bytes_per_s:
            return now_s
        self._free_s = max(self._free_s, now_s) + size / self.bytes_per_s
        return self._free_s


class Cable:
    """A cable to an address, with a listening address of its own.

    Attributes:
        address: Its near end.
        lost: Dropped bytes.
        read: Bytes sent through it, if it is not None.
        latency_s: Delay of bytes in each direction, in addition to the time in its wires.
    """

    def __init__(
        self,
        there: str,
        *,
        out: Sequence[Wire] = (),
        back: Sequence[Wire] = (),
        latency_s: float = 0.0,
    ) -> None:
        """Prepare; without wires it is as fast as the machine."""
        self.address = ""
        self.lost = 0
        self.latency_s = latency_s
        self.read: bytearray | None = None
        self._out, self._back = out, back
        self.lead_to(there)
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
        create_task = asyncio.get_running_loop().create_task
        for source, sink, wires in ((reader, there, self._out), (further, writer, self._back)):
            line: Line = asyncio.Queue(PIECES_MAX)
            self._tasks.add(create_task(self._take(source, line, wires)))
            self._tasks.add(create_task(_give(line, sink)))

    async def _take(self, source: asyncio.StreamReader, line: Line, wires: Sequence[Wire]) -> None:
        """Queue received bytes, as fast as the wires allow."""
        loop = asyncio.get_running_loop()
        pulled = False  # a connection that lost bytes is lost
        with contextlib.suppress(OSError):
            while data := await source.read(PIECE_BYTES):
                pulled = pulled or not self._plugged
                if pulled:
                    self.lost += len(data)
                    continue
                if self.read is not None:
                    self.read += data
                now_s = loop.time()
                through_s = max((wire.carry(len(data), now_s) for wire in wires), default=now_s)
                if through_s - now_s > TICK_S:
                    await asyncio.sleep(through_s - now_s)
                await line.put((through_s + self.latency_s, data))
        if not pulled and self._plugged:
            await line.put((loop.time() + self.latency_s, b""))

    def lead_to(self, there: str) -> None:
        """Direct new connections to an address."""
        self._ip, _, port = there.removeprefix("tcp://").rpartition(":")
        self._port = int(port)

    def pull(self) -> None:
        """Drop bytes from now on."""
        self._plugged = False

    def plug_in(self) -> None:
        """Let new connections through."""
        self._plugged = True


async def _give(line: Line, sink: asyncio.StreamWriter) -> None:
    """Write the queued bytes when they are due."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while True:
            due_s, data = await line.get()
            if due_s - loop.time() > TICK_S:
                await asyncio.sleep(due_s - loop.time())
            if not data:
                sink.write_eof()
                return
            sink.write(data)
            await sink.drain()
