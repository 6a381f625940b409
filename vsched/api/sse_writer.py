"""The way of deltas onto a connection.

A task for each stream would be woken for every token: an event, a future, a turn of the loop. So while the connection
takes what is written, deltas are written from within the call that announces them, and the task only waits for the
end. When the connection is full, the task waits for it, and deltas grow together meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from vsched.aio.streams.stream import OutputDelta
from vsched.api.contract import Generation
from vsched.api.formatters import Formatter
from vsched.api.http_exchange import HttpExchange
from vsched.api.metrics import RequestRecord


class SseWriter:
    """Writes the deltas of one generation as events."""

    def __init__(
        self,
        exchange: HttpExchange,
        record: RequestRecord,
        generation: Generation,
        formatter: Formatter,
    ) -> None:
        self._exchange = exchange
        self._record = record
        self._generation = generation
        self._formatter = formatter
        self._outcome = "stop"
        self._over = False
        self._full: asyncio.Future[Awaitable[None] | None] | None = None

    async def run(self) -> str:
        """Write everything; return why the generation ended.

        Raises:
            RequestFailed: When it ended in an error.
        """
        loop = asyncio.get_running_loop()
        self._generation.subscribe(self._on_news)
        try:
            while True:
                self._full = loop.create_future()
                self._on_news()
                rest = await self._full
                if rest is None:
                    return self._outcome
                await rest
                if self._over:
                    return self._outcome
        finally:
            self._generation.subscribe(None)
            if self._full is not None and self._full.done() and not self._full.cancelled():
                self._full.exception()  # a task that was cancelled meanwhile has nobody to tell

    def _on_news(self) -> None:
        full = self._full
        if full is None or full.done():
            return  # the task has the word
        try:
            while not self._over and (delta := self._generation.take()) is not None:
                rest = self._write(delta)
                if rest is not None:
                    full.set_result(rest)
                    return
        except Exception as error:  # noqa: BLE001 - it is the task's, which is where requests fail
            full.set_exception(error)
            return
        if self._over:
            full.set_result(None)

    def _write(self, delta: OutputDelta) -> Awaitable[None] | None:
        self._record.output()
        if delta.finish_reason is not None:
            self._outcome, self._over = delta.finish_reason, True
        return self._exchange.send_event_nowait(self._formatter.chunk(delta))
