"""The answers to a request that was resumed: they go on without a reader, and every reader gets all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from vsched.aio.streams.prompt_report import PromptReport
from vsched.aio.streams.stream import OutputDelta
from vsched.api.choices.accepted import AcceptedAnswers
from vsched.api.completions import CheckedRequest
from vsched.api.contract import Generation
from vsched.errors import RequestFailed, RequestRefused
from vsched.record.journal import KeptRequest

_DELTA_BYTES = 256
"""About what a delta of one token takes, beside its text and what is told of its alternatives."""
_TOP_BYTES = 128


class GatheredAnswer:
    """Everything that comes of one answer, a token at a time.

    Attributes:
        deltas: What came so far.
        error: What it ended in, if not well.
        ended: Whether nothing more comes.
        bytes: About what the deltas take.
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
        told = sum(_TOP_BYTES * (1 + len(one.top)) for one in delta.logprobs or ())
        self.bytes += _DELTA_BYTES + len(delta.text) + told
        self.ended = delta.finish_reason is not None

    def listen(self, key: int, reader: Callable[[], None] | None) -> None:
        """Have a reader called when there is more; None ends that."""
        if reader is None:
            self._readers.pop(key, None)
        else:
            self._readers[key] = reader


class GatheredReader:
    """A `Generation` that begins at the beginning of an answer, whenever that is read."""

    def __init__(self, answer: GatheredAnswer) -> None:
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

    def one_by_one(self) -> None:
        """Do nothing: each delta has one token."""

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
        """Do nothing: the answer is kept for whoever reads it next."""


class ResumedRequest:
    """A request that was left, from the start of this server until its answers are given up.

    Attributes:
        request: As it was accepted.
        error: Why it has no answers: it was refused, or ended before.
        job: What it asks for, once that is read anew.
        answers: Its answers, once it is accepted.
    """

    def __init__(self, request: KeptRequest, on_end: Callable[[ResumedRequest], None]) -> None:
        self.request = request
        self.error: RequestRefused | RequestFailed | None = None
        self.job: CheckedRequest | None = None
        self.answers: list[GatheredAnswer] = []
        self._on_end = on_end
        self._settled = asyncio.Event()

    @property
    def settled(self) -> bool:
        """Whether it is accepted, or has its error."""
        return self._settled.is_set()

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        whole = bool(self.answers) and all(answer.ended for answer in self.answers)
        return self.error is not None or whole

    @property
    def failed_for_good(self) -> bool:
        """Whether it ended in an error that another server would have, too: 503 is the state of this one."""
        errors = [self.error, *(answer.error for answer in self.answers)]
        return any(error is not None and error.status != 503 for error in errors)

    @property
    def bytes(self) -> int:
        """About what its answers take."""
        return sum(answer.bytes for answer in self.answers)

    def fail(self, error: RequestRefused | RequestFailed) -> None:
        """Have it end in an error."""
        self.error = error
        self._settled.set()
        self._on_end(self)

    def accepted(self, job: CheckedRequest, generations: Sequence[Generation]) -> None:
        """Gather its answers."""
        self.job = msgspec.structs.replace(job, prompts=(), images=())
        self.answers = [GatheredAnswer(one, self._on_answer_end) for one in generations]
        self._settled.set()
        if self.ended:
            self._on_end(self)

    def _on_answer_end(self) -> None:
        if self._settled.is_set() and self.ended:
            self._on_end(self)

    async def read(self) -> tuple[CheckedRequest, AcceptedAnswers]:
        """Return what it asks for, and its answers from their beginnings.

        Blocks: until it is accepted, which the server's own start and its queue bound.

        Raises:
            RequestRefused, RequestFailed: When it has none.
        """
        await self._settled.wait()
        if self.error is not None:
            raise self.error
        assert self.job is not None
        accepted = AcceptedAnswers()
        readers = [GatheredReader(answer) for answer in self.answers]
        for first in range(0, len(readers), self.job.drawn):
            accepted.add(readers[first : first + self.job.drawn])
        return self.job, accepted
