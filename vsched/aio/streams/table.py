"""Receivers of all live choices: they get tokens and exactly one end, and errors of one do not affect others."""

from __future__ import annotations

import asyncio
import itertools
import logging
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from vsched.aio.streams.stream import BROKEN, PromptReport, TokenLogprob
from vsched.kernel.commands import Finish, RequestTimes
from vsched.types import FinishReason
from vsched.wire import GenerateResult, PromptPiece, SlotLogprob


class AnswerSink(Protocol):
    """One accepted choice; for the methods see `TokenStream`."""

    request_id: str
    output_tokens: int
    times: RequestTimes
    prompt_report: PromptReport | None

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def reason(self) -> FinishReason | None: ...

    def push(self, token_id: int, logprob: TokenLogprob | None) -> None: ...
    def finish(self, finish: Finish) -> None: ...
    def give_up(self, message: str) -> None: ...
    def abort(self) -> None: ...
    def deliver(self) -> None: ...


def interrupt_all(choices: Sequence[AnswerSink], message: str) -> None:
    """End all choices of a request with an error."""
    for answer in choices:
        answer.give_up(message)
        answer.abort()


logger = logging.getLogger(__name__)


class StreamTable:
    """Live choices by id and by the kernel's number; `on_broken(request_id)` is called when one cannot continue."""

    def __init__(self, on_broken: Callable[[str], None]) -> None:
        self._on_broken = on_broken
        self._by_number: dict[int, AnswerSink] = {}
        self._numbers: dict[str, int] = {}
        self._loop = asyncio.get_running_loop()
        self._changed: dict[str, AnswerSink] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, number: int, generation: AnswerSink) -> None:
        """Register an accepted request."""
        self._by_number[number] = generation
        self._numbers[generation.request_id] = number
        self._idle.clear()

    def report(self, pieces: Sequence[PromptPiece]) -> None:
        """Pass a step's prompt log-probabilities to their choices, before its tokens."""
        for piece in pieces:
            stream = self._by_number.get(piece.number)
            if stream is None or stream.prompt_report is None:
                continue
            try:
                stream.prompt_report.take(piece)
            except ValueError:
                logger.exception("request %s cannot go on", stream.request_id)
                stream.give_up(BROKEN)
                self._on_broken(stream.request_id)

    def emit(self, result: GenerateResult) -> None:
        """Pass the tokens of a step to their choices."""
        logprobs: dict[int, deque[SlotLogprob]] = {}
        for one in result.logprobs:
            logprobs.setdefault(one.slot, deque()).append(one)
        more = {one.slot: one.tokens for one in result.drafted}
        numbers, tokens = int32_array(result.numbers), int32_array(result.tokens)
        for slot, (number, token) in enumerate(zip(numbers, tokens, strict=True)):
            stream = self._by_number.get(number) if token >= 0 else None
            if stream is None:
                continue  # no token, or aborted while the step was in flight
            reported = logprobs.get(slot, ())
            self._push(stream, token, reported)
            for further in more.get(slot, ()):
                self._read(stream)  # one token per delta: clients count tokens by events
                self._push(stream, further, reported)
            self._note(stream)

    def _push(
        self, stream: AnswerSink, token: int, reported: deque[SlotLogprob] | tuple[()]
    ) -> None:
        logprob = None
        if reported:
            found = reported.popleft()
            logprob = TokenLogprob(token, found.logprob, found.top)
        self._put(stream, token, logprob)

    def _put(self, stream: AnswerSink, token: int, logprob: TokenLogprob | None) -> None:
        try:
            stream.push(token, logprob)
        except Exception:
            logger.exception("request %s cannot go on", stream.request_id)
            stream.give_up(BROKEN)
            self._on_broken(stream.request_id)

    def take(self, number: int, token: int, logprob: TokenLogprob | None) -> None:
        """Pass a token to its choice; a pending earlier token is delivered first, in its own delta."""
        stream = self._by_number.get(number)
        if stream is None:
            return
        if stream.request_id in self._changed:
            self._read(stream)
        self._put(stream, token, logprob)
        self._note(stream)

    def _note(self, stream: AnswerSink) -> None:
        """Schedule the call of the choice's reader, after the current event together with all others."""
        if not self._changed:
            self._loop.call_soon(self._deliver)
        self._changed[stream.request_id] = stream

    def _deliver(self) -> None:
        changed, self._changed = self._changed, {}
        for stream in changed.values():
            self._read(stream)

    def _read(self, stream: AnswerSink) -> None:
        try:
            stream.deliver()
        except Exception:
            logger.exception("the reader of request %s failed", stream.request_id)

    def finish(self, finish: Finish) -> None:
        """End a choice."""
        generation = self._by_number.pop(finish.number)
        del self._numbers[finish.request_id]
        if not self._by_number:
            self._idle.set()
        try:
            generation.finish(finish)
        except Exception:
            logger.exception("request %s did not end well", finish.request_id)
        self._note(generation)

    def fail_all(self, message: str, *, code: str) -> None:
        """End all choices with an error, without the kernel."""
        for request_id, number in list(self._numbers.items()):
            reason = FinishReason.ERROR
            self.finish(Finish(request_id, number, reason, RequestTimes(), message, code))

    async def wait_idle(self) -> None:
        """Wait until no request is live.

        Blocks: without limit; wrap it in `asyncio.timeout`.
        """
        await self._idle.wait()

    def request_ids(self, count: int) -> list[str]:
        """Return the ids of the oldest live requests."""
        return list(itertools.islice(self._numbers, count))


def int32_array(data: bytes) -> array[int]:
    """Return little-endian int32 values."""
    values = array("i")
    values.frombytes(data)
    return values


class RequestTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one request in each phase, in milliseconds; `ended_ns` is of the kernel's clock."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    encoded_items: int
    preemptions: int
    preprocess_ms: float
    encode_ms: float
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    finish_reason: str
    ended_ns: int = 0


def timeline_of(generation: AnswerSink, preprocess_ms: float) -> RequestTimeline:
    """Return the timeline of an ended request."""
    times = generation.times

    def span_ms(start_ns: int, end_ns: int) -> float:
        return round((end_ns - start_ns) / 1e6, 3) if start_ns and end_ns else 0.0

    return RequestTimeline(
        request_id=generation.request_id,
        prompt_tokens=generation.prompt_tokens,
        cached_tokens=times.cached_tokens,
        output_tokens=generation.output_tokens,
        encoded_items=times.encoded_items,
        preemptions=times.preemptions,
        preprocess_ms=round(preprocess_ms, 3),
        encode_ms=span_ms(times.submitted_ns, times.items_ready_ns),
        queue_ms=span_ms(times.items_ready_ns, times.admitted_ns),
        prefill_ms=span_ms(times.admitted_ns, times.first_token_ns),
        decode_ms=span_ms(times.first_token_ns, times.finished_ns),
        finish_reason=(generation.reason or FinishReason.ERROR).value,
        ended_ns=times.finished_ns,
    )
