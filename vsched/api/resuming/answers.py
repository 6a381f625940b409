"""Choices of a resumed request: generated without a reader; every reader gets them from the start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from vsched.aio.streams import OutputDelta, PromptReport
from vsched.api.choices import AcceptedChoices
from vsched.api.completions import CheckedRequest
from vsched.api.contract import Generation
from vsched.errors import RequestFailed, RequestRefused
from vsched.kernel.commands import RequestTimes
from vsched.record.journal import KeptRequest
from vsched.types import FinishReason

_DELTA_BYTES = 256
"""Approximate memory of a one-token delta, without its text and alternatives."""
_TOP_BYTES = 128


class BufferedChoice:
    """Buffers the deltas of one choice, one token each.

    Attributes:
        deltas: Deltas so far.
        error: Error that ended it, if any.
        ended: True if no more deltas follow.
        bytes: Approximate memory of the deltas.
    """

    def __init__(self, source: Generation, on_end: Callable[[], None]) -> None:
        self.source = source
        self.deltas: list[OutputDelta] = []
        self.error: RequestFailed | None = None
        self.ended = False
        self.bytes = 0
        self._on_end = on_end
        self._readers: dict[int, Callable[[], None]] = {}
        source.one_by_one()
        source.subscribe(self._on_news)
        self._on_news()

    def _on_news(self) -> None:
        try:
            while not self.ended and (delta := self.source.take()) is not None:
                self._add(delta)
        except RequestFailed as error:
            self.error, self.ended = error, True
        for reader in list(self._readers.values()):
            reader()
        if self.ended:
            self.source.subscribe(None)
            self._on_end()

    def _add(self, delta: OutputDelta) -> None:
        self.deltas.append(delta)
        reported = sum(_TOP_BYTES * (1 + len(one.top)) for one in delta.logprobs or ())
        self.bytes += _DELTA_BYTES + len(delta.text) + reported
        self.ended = delta.finish_reason is not None

    def listen(self, key: int, reader: Callable[[], None] | None) -> None:
        """Call a reader when there are new deltas; None unsubscribes it."""
        if reader is None:
            self._readers.pop(key, None)
        else:
            self._readers[key] = reader


class BufferedGeneration:
    """A `Generation` that replays a choice from the start."""

    def __init__(self, answer: BufferedChoice) -> None:
        self._answer = answer
        self._at = 0
        self._has_failed = False
        self.output_tokens = 0

    @property
    def request_id(self) -> str:
        return self._answer.source.request_id

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return self._answer.source.prompt_token_ids

    @property
    def prompt_tokens(self) -> int:
        return self._answer.source.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self._answer.source.cached_tokens

    @property
    def prompt_report(self) -> PromptReport | None:
        return self._answer.source.prompt_report

    @property
    def times(self) -> RequestTimes:
        return self._answer.source.times

    @property
    def reason(self) -> FinishReason | None:
        return self._answer.source.reason

    def one_by_one(self) -> None:
        """No-op: each delta has one token."""

    def subscribe(self, reader: Callable[[], None] | None) -> None:
        self._answer.listen(id(self), reader)

    def take(self) -> OutputDelta | None:
        answer = self._answer
        if self._at < len(answer.deltas):
            delta = answer.deltas[self._at]
            self._at += 1
            self.output_tokens += len(delta.token_ids)
            return delta
        if answer.error is not None and not self._has_failed:
            self._has_failed = True
            raise answer.error
        return None

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        return self

    async def __anext__(self) -> OutputDelta:
        while (delta := self.take()) is None:
            if self._answer.ended:
                raise StopAsyncIteration
            news = asyncio.Event()
            self.subscribe(news.set)
            try:
                await news.wait()
            finally:
                self.subscribe(None)
        return delta

    def abort(self) -> None:
        """No-op: the choice is kept for later readers."""


class ResumedRequest:
    """A resumed request, from the start of this server until its choices are dropped.

    Attributes:
        request: The saved request.
        error: Error that ended it, or that refused it now.
        job: The checked request, after its body was read again.
        answers: Its choices, once it is accepted.
    """

    def __init__(self, request: KeptRequest, on_end: Callable[[ResumedRequest], None]) -> None:
        self.request = request
        self.error: RequestRefused | RequestFailed | None = None
        self.job: CheckedRequest | None = None
        self.choices: list[BufferedChoice] = []
        self._on_end = on_end
        self._settled = asyncio.Event()

    @property
    def settled(self) -> bool:
        """True if it was accepted or has failed."""
        return self._settled.is_set()

    @property
    def ended(self) -> bool:
        """True if no more output follows."""
        whole = bool(self.choices) and all(answer.ended for answer in self.choices)
        return self.error is not None or whole

    @property
    def failed_for_good(self) -> bool:
        """True if it failed with an error that another server would report, too; a 503 depends on this server."""
        errors = [self.error, *(answer.error for answer in self.choices)]
        return any(error is not None and error.status != 503 for error in errors)

    @property
    def bytes(self) -> int:
        """Approximate memory of its choices."""
        return sum(answer.bytes for answer in self.choices)

    def fail(self, error: RequestRefused | RequestFailed) -> None:
        """End it with an error."""
        self.error = error
        self._settled.set()
        self._on_end(self)

    def accepted(self, job: CheckedRequest, generations: Sequence[Generation]) -> None:
        """Start to buffer its choices."""
        self.job = msgspec.structs.replace(job, prompts=(), images=())
        self.choices = [BufferedChoice(one, self._on_answer_end) for one in generations]
        self._settled.set()
        if self.ended:
            self._on_end(self)

    def _on_answer_end(self) -> None:
        if self._settled.is_set() and self.ended:
            self._on_end(self)

    async def read(self) -> tuple[CheckedRequest, AcceptedChoices]:
        """Return the checked request, and its choices from the start.

        Blocks: until it is accepted, which depends on the server's start and queue.

        Raises:
            RequestRefused, RequestFailed: If it failed.
        """
        await self._settled.wait()
        if self.error is not None:
            raise self.error
        assert self.job is not None
        accepted = AcceptedChoices()
        readers = [BufferedGeneration(answer) for answer in self.choices]
        for first in range(0, len(readers), self.job.drawn):
            accepted.add(readers[first : first + self.job.drawn])
        return self.job, accepted
