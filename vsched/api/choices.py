"""Choices of one HTTP request, from acceptance to the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from vsched.aio.streams import OutputDelta
from vsched.api.contract import GenerationContract
from vsched.api.formatters import Formatter, usage_of
from vsched.api.http_exchange import HttpExchange
from vsched.api.metrics import RequestRecord
from vsched.api.response_schema import Usage

_INLINE_VALUES_MAX = 4096
"""Up to this number of log-probabilities are formatted on the event loop; more take a thread."""


class CompleteChoice(msgspec.Struct, frozen=True):
    """A complete choice."""

    generation: GenerationContract
    deltas: list[OutputDelta]

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability per token, the criterion of `best_of`."""
        found = [one.logprob for delta in self.deltas for one in delta.logprobs or ()]
        return sum(found) / max(len(found), 1)

    @property
    def logprobs(self) -> int:
        """Number of log-probabilities of prompt and output, with alternatives."""
        report = self.generation.prompt_report
        output = sum(1 + len(one.top) for delta in self.deltas for one in delta.logprobs or ())
        return output if report is None else output + report.values


def formats_inline(answers: Iterable[CompleteChoice]) -> bool:
    """True if formatting these choices, or parts of them, takes no thread."""
    return sum(answer.logprobs for answer in answers) <= _INLINE_VALUES_MAX


class AcceptedChoices:
    """Choices for all prompts of one HTTP request: prompt by prompt, the same number for each.

    The choices of one prompt are accepted together; if a later prompt is refused, those already accepted are aborted.
    """

    def __init__(self) -> None:
        self._families: list[Sequence[GenerationContract]] = []

    def add(self, choices: Sequence[GenerationContract]) -> None:
        """Add the choices of the next prompt."""
        self._families.append(choices)

    @property
    def generations(self) -> list[GenerationContract]:
        """All choices in order."""
        return [one for choices in self._families for one in choices]

    @property
    def usage(self) -> Usage:
        """Usage so far; every generated choice counts, even if only the best ones are returned."""
        return usage_of(*self._families)

    def abort(self) -> None:
        """Abort all choices."""
        for generation in self.generations:
            generation.abort()

    async def collect(self, record: RequestRecord, *, best: int) -> list[CompleteChoice]:
        """Wait for all choices and return the `best` of each prompt, most likely first; without selection, in order.

        Blocks: until the last one has ended; unread ones buffer their output.

        Raises:
            RequestFailed: If one ended in an error.
        """
        chosen: list[CompleteChoice] = []
        index = 0
        for choices in self._families:
            drawn = []
            for generation in choices:
                deltas: list[OutputDelta] = []
                async for delta in generation:
                    record.output(index)
                    deltas.append(delta)
                drawn.append(CompleteChoice(generation, deltas))
                index += 1
            if best < len(drawn):
                drawn = sorted(drawn, key=lambda one: -one.mean_logprob)[:best]
            chosen += drawn
        return chosen


def without_logprobs(deltas: Sequence[OutputDelta]) -> list[OutputDelta]:
    """Remove log-probabilities, for a request that did not ask for them."""
    return [msgspec.structs.replace(delta, logprobs=None) for delta in deltas]


def choice_id(request_id: str, index: int) -> str:
    """Request id of a choice; a client's id cannot contain this separator."""
    return f"{request_id}#{index}" if index else request_id


class ChoiceStream(NamedTuple):
    """One choice of a stream: the source of its deltas, and their formatter."""

    generation: GenerationContract
    formatter: Formatter


class SseWriter:
    """Writes the deltas of one or several choices as events."""

    def __init__(
        self, exchange: HttpExchange, record: RequestRecord, choices: Sequence[ChoiceStream]
    ) -> None:
        self._exchange = exchange
        self._record = record
        self._choices = choices
        self._outcomes: dict[int, str] = {}
        self._full: asyncio.Future[Awaitable[None] | None] | None = None

    async def write_deltas(self) -> str:
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
        generation, formatter = self._choices[index]
        if delta.logprobs is None or formats_inline([CompleteChoice(generation, [delta])]):
            return self._exchange.send_event_nowait(formatter.chunk(delta))
        return self._write_in_thread(formatter, delta)

    async def _write_in_thread(self, formatter: Formatter, delta: OutputDelta) -> None:
        await self._exchange.send_event(await asyncio.to_thread(formatter.chunk, delta))
