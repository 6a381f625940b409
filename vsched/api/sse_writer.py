"""The way of deltas onto a connection.

A task for each stream would be woken for every token: an event, a future, a turn of the loop. So while the connection
takes what is written, deltas are written from within the call that announces them, and the task only waits for the
end. When the connection is full, the task waits for it, and deltas grow together meanwhile.
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
    """One answer of a stream: where its deltas come from, and what words them."""

    generation: Generation
    formatter: Formatter


class SseWriter:
    """Writes the deltas of one or several answers as events."""

    def __init__(
        self, exchange: HttpExchange, record: RequestRecord, answers: Sequence[Voice]
    ) -> None:
        self._exchange = exchange
        self._record = record
        self._answers = answers
        self._outcomes: dict[int, str] = {}
        self._full: asyncio.Future[Awaitable[None] | None] | None = None

    async def run(self) -> str:
        """Write everything; return why the first answer ended.

        Raises:
            RequestFailed: When one ended in an error; nothing of the others is written after it.
        """
        loop = asyncio.get_running_loop()
        for index, (generation, _) in enumerate(self._answers):
            generation.subscribe(partial(self._on_news, index))
        try:
            while True:
                self._full = loop.create_future()
                for index in range(len(self._answers)):
                    self._on_news(index)
                rest = await self._full
                if rest is not None:
                    await rest
                if self._over:
                    return self._outcomes[0]
        finally:
            for generation, _ in self._answers:
                generation.subscribe(None)
            if self._full is not None and self._full.done() and not self._full.cancelled():
                self._full.exception()  # a task that was cancelled meanwhile has nobody to tell

    @property
    def _over(self) -> bool:
        return len(self._outcomes) == len(self._answers)

    def _on_news(self, index: int) -> None:
        full = self._full
        if full is None or full.done():
            return  # the task has the word
        generation = self._answers[index].generation
        try:
            while index not in self._outcomes and (delta := generation.take()) is not None:
                rest = self._write(index, delta)
                if rest is not None:
                    full.set_result(rest)
                    return
        except Exception as error:  # noqa: BLE001 - it is the task's, which is where requests fail
            full.set_exception(error)
            return
        if self._over:
            full.set_result(None)

    def _write(self, index: int, delta: OutputDelta) -> Awaitable[None] | None:
        self._record.output(index)
        if delta.finish_reason is not None:
            self._outcomes[index] = delta.finish_reason
        return self._exchange.send_event_nowait(self._answers[index].formatter.chunk(delta))
