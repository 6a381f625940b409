"""Calls between an API process and the engine, over a socket pair.

A frame is a list of calls: all of an event loop iteration, in order, each a name and arguments, which call the method
`on_<name>` of the other side. Arguments are decoded as the types that the method declares.

When a process ends, in whatever manner, its link closes, and the other side notices at once. Calls never wait; senders
of large arguments use `call_large`. Buffered data is limited: a peer that does not read is dropped once too many bytes
wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import socket
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec

from vsched.api.contract import ApiSettings
from vsched.config import Config
from vsched.fork_server import IMPORT_S

logger = logging.getLogger(__name__)
WAITING_BYTES_MAX = 64 << 20
"""Maximum bytes that may wait to be read by the peer, in addition to request bodies."""
BEAT_S = 1.0
"""Interval at which each side sends at least a sign of life."""
SILENT_S = 60.0
"""A peer that has sent nothing for this time is dropped: its event loop hangs, or it is stopped."""
GAP_MAX_S = 2 * BEAT_S
"""Maximum time between two looks at a silent peer; in a longer gap this process was suspended."""
_SIZE_BYTES = 8
_encoder = msgspec.msgpack.Encoder()
_calls_decoder = msgspec.msgpack.Decoder(list[tuple[str, msgspec.Raw]])


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Standard input of an API process.

    Attributes:
        listener: Descriptor of the socket that it listens on.
        at_once: Answer with 503 while loading; a restarted process leaves new connections to the others instead.
    """

    index: int
    config: Config
    settings: ApiSettings
    listener: int
    at_once: bool


class Link:
    """One end: calls from the other go to methods of `receivers`, and `on_lost` is called once with the reason."""

    def __init__(
        self,
        *receivers: object,
        on_lost: Callable[[str], None],
        waiting_bytes_max: int = WAITING_BYTES_MAX,
    ) -> None:
        """Create an end, to be started by `open`, with a limit of unsent data."""
        self.receivers = receivers
        self._methods: dict[str, tuple[Callable[..., None], msgspec.msgpack.Decoder[Any]]] = {}
        self._on_lost = on_lost
        self._waiting_bytes_max = waiting_bytes_max
        self._calls: list[tuple[str, tuple[Any, ...]]] = []
        self._early: list[bytes] = []
        self._large = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._silent_s = SILENT_S - IMPORT_S  # until its first data, the peer may be importing
        self._looked_s = self._loop.time()
        self.lost = False

    async def open(self, end: socket.socket) -> None:
        """Start on one socket of a pair."""
        end.setblocking(False)
        reader, self._writer = await asyncio.open_unix_connection(sock=end)
        for frame in self._early:
            self._send(frame)
        self._reading = self._loop.create_task(self._read(reader))

    def call(self, name: str, *arguments: Any, first: bool = False) -> None:
        """Call `on_<name>` of the other side, together with the other calls of this iteration, `first` or last."""
        if not self._calls:
            self._loop.call_soon(self.flush)
        self._calls.insert(0 if first else len(self._calls), (name, arguments))

    async def call_large(self, name: str, *arguments: Any) -> None:
        """Call with large arguments after all earlier calls, once the peer has read previous large ones.

        Blocks: until then, or until the link is lost.
        """
        async with self._large:
            await self._drained()
            self.call(name, *arguments)
            self.flush()

    def flush(self) -> None:
        """Send the collected calls; on a lost link they are dropped."""
        calls, self._calls = self._calls, []
        if calls and not self.lost:
            self._send(_encoder.encode(calls))

    def _send(self, frame: bytes) -> None:
        if self._writer is None:
            self._early.append(frame)
            return
        self._writer.write(len(frame).to_bytes(_SIZE_BYTES, "little"))
        self._writer.write(frame)
        waiting = self._writer.transport.get_write_buffer_size()
        if waiting > self._waiting_bytes_max:
            self.drop_peer(f"does not read: {waiting} bytes wait, limit {self._waiting_bytes_max}")

    async def _drained(self) -> None:
        if self._writer is not None and not self.lost:
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        why = "has closed its link"
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(_SIZE_BYTES), "little")
                self.receive(await reader.readexactly(size))
        except asyncio.IncompleteReadError:
            pass
        except OSError as error:
            why = str(error)
        except Exception:
            logger.exception("a call could not be carried out")
            why = "made a call that could not be carried out"
        self.drop_peer(why)

    def receive(self, frame: bytes) -> None:
        """Carry out the calls of a frame."""
        self._silent_s, self._looked_s = 0.0, self._loop.time()
        for name, sent in _calls_decoder.decode(frame):
            if name not in self._methods:
                self._methods[name] = self._method(name)
            method, decoder = self._methods[name]
            method(*decoder.decode(sent))

    def _method(self, name: str) -> tuple[Callable[..., None], msgspec.msgpack.Decoder[Any]]:
        receiver = next(one for one in self.receivers if hasattr(one, f"on_{name}"))
        method = getattr(receiver, f"on_{name}")
        hints = get_type_hints(method)
        kinds = [hints[parameter] for parameter in inspect.signature(method).parameters]
        return method, msgspec.msgpack.Decoder(tuple.__class_getitem__(tuple(kinds)))

    def silent_s(self) -> float:
        """Time since the last data from the peer, for a caller that looks every `BEAT_S`.

        Time in which this process was suspended, as in a frozen container, does not count: its peer was, too.
        """
        now_s = self._loop.time()
        self._silent_s += min(now_s - self._looked_s, GAP_MAX_S)
        self._looked_s = now_s
        return self._silent_s

    def drop_peer(self, why: str) -> None:
        """Drop the peer; idempotent."""
        if self.lost:
            return
        self.lost = True
        if self._writer is not None:
            self._writer.transport.abort()
        self._on_lost(why)

    def close(self) -> None:
        """Send unsent data and close, without calling `on_lost`."""
        self.flush()
        self.lost = True
        if self._writer is not None:
            self._writer.close()
