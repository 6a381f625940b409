"""Write deltas to a connection.

A task for each stream would be woken for every token: an event, a future, an iteration of the loop. So while the
connection accepts data, deltas are written in the callback that announces them, and the task only waits for the end. If
the connection is full, the task waits for it, and deltas are merged meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import NamedTuple

from vsched.aio.streams.stream import OutputDelta
from vsched.api.contract import Generation
from vsched.api.formatters import Formatter
from vsched.api.http_exchange import HttpExchange
from vsched.api.metrics import RequestRecord


class Voice(NamedTuple):
    """One choice of a stream: the source of its deltas, and their formatter."""

    generation: Generation
    formatter: Formatter


class SseWriter:
    """Writes the deltas of one or several choices as events."""

    def __init__(
        self, exchange: HttpExchange, record: RequestRecord, choices: Sequence[Voice]
    ) -> None:
        self._exchange = exchange
        self._record = record
        self._choices = choices
        self._outcomes: dict[int, str] = {}
        self._full: asyncio.Future[Awaitable[None] | None] | None = None

    async def run(self) -> str:
        """Write all deltas; return the finish reason of the first choice.

        Raises:
            RequestFailed: If one ended in an error; nothing is written after it.
        """
        loop = asyncio.get_running_loop()
        for index, (generation, _) in enumerate(self._choices):
            generation.subscribe(partial(self._on_news, index))
        try:
            while True:
                self._full = loop.create_future()
                for index in range(len(self._choices)):
                    self._on_news(index)
                rest = await self._full
                if rest is not None:
                    await rest
                if self._over:
                    return self._outcomes[0]
        finally:
            for generation, _ in self._choices:
                generation.subscribe(None)
            if self._full is not None and self._full.done() and not self._full.cancelled():
                self._full.exception()  # mark as retrieved, in case the task was cancelled

    @property
    def _over(self) -> bool:
        return len(self._outcomes) == len(self._choices)

    def _on_news(self, index: int) -> None:
        full = self._full
        if full is None or full.done():
            return  # the task writes next
        generation = self._choices[index].generation
        try:
            while index not in self._outcomes and (delta := generation.take()) is not None:
                rest = self._write(index, delta)
                if rest is not None:
                    full.set_result(rest)
                    return
        except Exception as error:  # noqa: BLE001 - raised in the task
            full.set_exception(error)
            return
        if self._over:
            full.set_result(None)

    def _write(self, index: int, delta: OutputDelta) -> Awaitable[None] | None:
        self._record.output(index)
        if delta.finish_reason is not None:
            self._outcomes[index] = delta.finish_reason
        return self._exchange.send_event_nowait(self._choices[index].formatter.chunk(delta))
