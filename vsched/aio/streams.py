"""The output of choices: detokenization, stop strings, prompt log-probabilities, and a reader's handle.

The `StreamTable` holds the `TokenStream` of each live choice, so a `TokenStream` is never garbage-collected before its
end. Only the caller refers to the `Generation`, and the request ends when that is dropped. Each choice gets tokens and
exactly one end, and errors of one do not affect others.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from vsched.errors import RequestFailed
from vsched.kernel.commands import Finish, RequestTimes
from vsched.types import FinishReason, SamplingParams
from vsched.wire import GenerateResult, PromptPiece, SlotLogprob
from vsched.worker.contract import Detokenizer

logger = logging.getLogger(__name__)


class PromptToken(NamedTuple):
    """A token of a prompt: its log-probability and rank (1 is the most likely), and alternatives, best first."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class PromptReport:
    """The log-probabilities of a prompt, with `top` alternatives per token; the first token has none.

    Pieces arrive in order. A request that is computed again, because its group was lost, repeats known pieces.
    """

    def __init__(self, token_ids: Sequence[int], top: int) -> None:
        self.top = top
        self._token_ids = token_ids
        self._pieces: list[PromptPiece] = []
        self._known = 1
        self._waiting: list[Callable[[], object]] = []

    @property
    def values(self) -> int:
        """Number of log-probabilities of the complete report."""
        return len(self._token_ids) * (1 + self.top)

    @property
    def is_complete(self) -> bool:
        """Whether all pieces have arrived."""
        return self._known >= len(self._token_ids)

    def when_complete(self, call: Callable[[], object]) -> None:
        """Call `call` once, with the last piece."""
        self._waiting.append(call)

    def add_piece(self, piece: PromptPiece) -> None:
        """Add the piece of a chunk.

        Raises:
            ValueError: When there is a gap before it.
        """
        if piece.start > self._known:
            raise ValueError(f"position {piece.start} of a prompt is reported before {self._known}")
        end = piece.start + len(piece.logprobs) // 4  # float32
        if end > self._known:
            self._pieces.append(piece)
            self._known = end
        if self.is_complete:
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                call()

    def tokens(self) -> Iterator[PromptToken]:
        """Yield the prompt tokens from the second on.

        Raises:
            ValueError: When the report is incomplete.
        """
        if not self.is_complete:
            raise ValueError(f"{self._known} of {len(self._token_ids)} prompt tokens are known")
        position = 1
        for piece in self._pieces:
            logprobs = np.frombuffer(piece.logprobs, np.float32)
            ranks = np.frombuffer(piece.ranks, np.int32)
            ids = np.frombuffer(piece.top_ids, np.int32).reshape(len(ranks), -1)
            top = np.frombuffer(piece.top_logprobs, np.float32).reshape(len(ranks), -1)
            for row in range(position - piece.start, len(ranks)):
                best = zip(ids[row].tolist(), top[row].tolist(), strict=True)
                token_id = self._token_ids[position]
                yield PromptToken(token_id, float(logprobs[row]), int(ranks[row]), list(best))
                position += 1


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability of a sampled token, and of the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class OutputDelta(msgspec.Struct, frozen=True):
    """Output since the last delta: several tokens if they arrived faster than they were read.

    `logprobs`, if requested, has one entry per token of `token_ids`. `text` lags behind `token_ids` while characters
    are incomplete or a stop string might begin. Only the last delta has a `finish_reason`, and the `stop_string` that
    ended the choice, if any.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_string: str | None = None


UNAVAILABLE = ("cleared", "stopping", "given_up", "expired")
"""Codes of errors caused by the server's state: the request may succeed on another server."""
GRAMMAR_FAILED = "grammar_failed"
"""Code of an error caused by the request: HTTP status 400, although the request was accepted."""
RETRY_AFTER_S = 5
_FAILURES = (FinishReason.ERROR, FinishReason.ABORT)
"""Finish reasons that may precede the prompt's log-probabilities."""
DETOKENIZATION_FAILED = "the output could not be detokenized"
"""Error sent to the client when detokenization fails."""


def failure_of(message: str, *, code: str) -> RequestFailed:
    """Return the client's error for a request that ended in an error."""
    if code in UNAVAILABLE:
        return RequestFailed(message, code=code, status=503, retry_after_s=RETRY_AFTER_S)
    return RequestFailed(message, code=code, status=400 if code == GRAMMAR_FAILED else 500)


class StopScope(Protocol):
    """Splits a choice's text into parts in which stop strings apply, and parts in which they do not (tool calls)."""

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Take the next piece of text; return the parts known so far, each with True if stop strings apply to it."""

    def split_rest(self, *, cut: bool) -> list[tuple[str, bool]]:
        """Return the parts held back until the end; `cut` is True if the length limit ended the choice."""


class StopMatcher:
    """Finds stop strings in a text that arrives in pieces; with `include` the found one is part of the output.

    Text that might begin a stop string is held back until that is decided. `found` is the stop string that was found.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self._exempt = 0
        self.found: str | None = None

    def push_text(self, text: str, *, exempt: bool = False) -> tuple[str, bool]:
        """Return the text that can be sent now, and True if a stop string follows it.

        A stop string may begin, but not end, within text that is `exempt`.
        """
        if not self._stops:
            return text, False
        self._held += text
        if exempt:
            self._exempt = len(self._held)
        found = [
            (index + len(stop), index, stop)
            for stop in self._stops
            if (index := self._held.find(stop, max(self._exempt - len(stop) + 1, 0))) >= 0
        ]
        if found:
            # The match that ends first, as if the text had arrived letter by letter.
            end, begin, self.found = min(found)
            out, self._held = self._held[: end if self._include else begin], ""
            return out, True
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        self._exempt = max(self._exempt - cut, 0)
        return out, False

    def flush(self) -> str:
        """Return the text held back, which turned out not to be a stop string."""
        out, self._held, self._exempt = self._held, "", 0
        return out


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def as_internal_error(finish: Finish, message: str) -> Finish:
    """Return the finish with an internal error."""
    return msgspec.structs.replace(
        finish, reason=FinishReason.ERROR, message=message, code="internal_error"
    )


class ChoiceInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Constructor arguments of a `TokenStream`, or of another `ChoiceSink`.

    Attributes:
        stop_token_ids: Stop tokens of the request and of the checkpoint.
        report: Log-probabilities of the prompt, shared by the choices of a request; None unless requested.
        on_stop: Ends the choice with this id early.
        on_end: Called at its end.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: frozenset[int] = frozenset()
    report: PromptReport | None = None
    on_stop: Callable[[str, FinishReason], None]
    on_end: Callable[[], None]


class TokenStream:
    """One accepted choice, read as an asynchronous iterator of deltas by a single reader.

    Tokens that arrive faster than they are read are merged into one delta. Iteration raises `RequestFailed` if the
    request ended in an error.

    Attributes:
        prompt_report: Log-probabilities of the prompt, shared by the choices of a request; None unless requested.
    """

    def __init__(
        self,
        inputs: ChoiceInputs,
        make_detokenizer: Callable[..., Detokenizer],
        *,
        make_stop_scope: Callable[[], StopScope] | None = None,
    ) -> None:
        """Create a stream; `make_detokenizer` gets `special`, whether special tokens are shown."""
        sampling = inputs.sampling
        self.request_id = inputs.request_id
        self.prompt_token_ids = inputs.prompt_token_ids
        self.output_tokens = 0
        self.times = RequestTimes()
        self.prompt_report = inputs.report
        self._detokenizer = make_detokenizer(special=sampling.show_special)
        self._matcher = StopMatcher(sampling.stop, include=sampling.include_stop)
        self._has_stops = bool(sampling.stop)
        self._min_tokens = sampling.min_tokens
        self._stop_scope = make_stop_scope() if make_stop_scope and sampling.stop else None
        self._silent_token_ids = frozenset() if sampling.include_stop else inputs.stop_token_ids
        self._prompt_only = sampling.prompt_only
        self._on_stop = inputs.on_stop
        self._on_end = inputs.on_end
        self._text: list[str] = []
        self._single = False
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None if sampling.logprobs is None else []
        self._stopped = False
        self._error = ""
        self._finish: Finish | None = None
        self._ended = False
        self._awaits_prompt = False
        self._changed = asyncio.Event()
        self._reader: Callable[[], None] | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def cached_tokens(self) -> int:
        return self.times.cached_tokens

    @property
    def reason(self) -> FinishReason | None:
        return None if self._finish is None else self._finish.reason

    def push_token(self, token_id: int, logprob: TokenLogprob | None) -> None:
        if self._stopped or self._finish is not None or self._prompt_only:
            return
        self.output_tokens += 1
        self._token_ids.append(token_id)
        if self._logprobs is not None and logprob is not None:
            self._logprobs.append(logprob)
        if token_id in self._silent_token_ids:
            self._text.append("")
            self._changed.set()  # it ends the choice and is not part of its text
            return
        text = self._detokenizer.push((token_id,))
        if self._has_stops:
            scope = self._stop_scope
            text, self._stopped = self._until_stop(
                [(text, True)] if scope is None else scope.split(text)
            )
        self._text.append(text)
        if self._stopped:
            self._on_stop(self.request_id, FinishReason.STOP)
        self._changed.set()

    def push_finish(self, finish: Finish) -> None:
        assert self._finish is None, "a request has two terminal replies"
        self._finish = finish
        self.times = finish.times
        try:
            self._finish = self._conclude(finish)
        except Exception:
            # The reader must not mistake the text so far for the complete output.
            logger.exception("the end of request %s could not be detokenized", self.request_id)
            self._finish = as_internal_error(finish, DETOKENIZATION_FAILED)
        finally:
            self._changed.set()
            self._on_end()

    def _conclude(self, finish: Finish) -> Finish:
        """Add the text held back, and return the finish with its final reason."""
        if self._error:
            return as_internal_error(finish, self._error)
        if finish.message:
            return finish  # the reader gets only the error
        if self._prompt_only and finish.reason is FinishReason.STOP:
            # `max_tokens` is 0: the stop token that was sampled is not part of the output.
            return msgspec.structs.replace(finish, reason=FinishReason.LENGTH)
        if not self._stopped:
            text, scope = self._detokenizer.flush(), self._stop_scope
            parts = [(text, True)]
            if scope is not None:
                cut = finish.reason is FinishReason.LENGTH
                parts = [*scope.split(text), *scope.split_rest(cut=cut)]
            text, self._stopped = self._until_stop(parts)
            self._text += [text, self._matcher.flush()]
        if self._stopped and finish.reason is FinishReason.LENGTH:
            # The last permitted token completed a stop string.
            return msgspec.structs.replace(finish, reason=FinishReason.STOP)
        return finish

    def _until_stop(self, parts: Iterable[tuple[str, bool]]) -> tuple[str, bool]:
        """Return the text of these parts that can be sent, and True if a stop string follows it."""
        exempt = self.output_tokens <= self._min_tokens
        out = ""
        for text, counts in parts:
            if not counts:
                out += self._matcher.flush() + text
                continue
            said, stopped = self._matcher.push_text(text, exempt=exempt)
            out += said
            if stopped:
                return out, True
        return out, False

    def fail(self, message: str) -> None:
        """Drop further tokens, and end with this error whatever the finish reason is."""
        self._error = message
        self._stopped = True

    def abort(self) -> None:
        if self._finish is None:
            self._on_stop(self.request_id, FinishReason.ABORT)

    def subscribe(self, reader: Callable[[], None] | None) -> None:
        """Call `reader` when `take` may return a delta, at most once per step; None ends the subscription.

        An alternative to iteration, without a task switch per token; called from the event loop.
        """
        self._reader = reader

    def one_by_one(self) -> None:
        """Return one token per delta from now on, so that deltas do not depend on the reader's timing."""
        self._single = True

    def deliver(self) -> None:
        """Call the reader, if any, after a step with output for this choice."""
        if self._reader is not None:
            self._reader()

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        return self

    async def __anext__(self) -> OutputDelta:
        """Return the next delta; it does not wait for the prompt's log-probabilities.

        Blocks: until a token or the end arrives; the leader's step deadline bounds that.

        Raises:
            RequestFailed: When the request ended in an error.
        """
        if self._ended:
            raise StopAsyncIteration
        await self._changed.wait()
        return self._take_delta()

    def take(self) -> OutputDelta | None:
        """Return the next delta; None when there is none yet, or the last one was taken.

        With `prompt_logprobs`, there is none before the prompt's log-probabilities are complete, since the first event
        may echo them. Another choice of the same request computes them.

        Raises:
            RequestFailed: When the request ended in an error.
        """
        if self._ended or not self._changed.is_set():
            return None
        if self._waits_for_prompt():
            return None
        return self._take_delta()

    def _waits_for_prompt(self) -> bool:
        """Return True if the prompt's log-probabilities are incomplete; then call the reader once they are complete."""
        report = self.prompt_report
        finish = self._finish
        failed = finish is not None and (finish.reason in _FAILURES or bool(finish.message))
        if report is None or report.is_complete or failed:
            return False
        if not self._awaits_prompt:
            self._awaits_prompt = True
            report.when_complete(partial(asyncio.get_running_loop().call_soon, self.deliver))
        return True

    def _take_delta(self) -> OutputDelta:
        finish = self._finish
        if self._single and len(self._token_ids) > 1 and not (finish and finish.message):
            return self._take_first()
        self._changed.clear()
        if finish is not None:
            self._ended = True
            if finish.reason is FinishReason.ERROR or finish.message:
                raise failure_of(finish.message, code=finish.code)
        delta = OutputDelta(
            text="".join(self._text),
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            finish_reason=None if finish is None else finish.reason.value,
            stop_string=None if finish is None else self._matcher.found,
        )
        self._text, self._token_ids = [], []
        if self._logprobs is not None:
            self._logprobs = []
        return delta

    def _take_first(self) -> OutputDelta:
        reported = None
        if self._logprobs is not None:
            reported, self._logprobs = self._logprobs[:1], self._logprobs[1:]
        return OutputDelta(self._text.pop(0), [self._token_ids.pop(0)], reported)


class Generation:
    """One accepted request: an asynchronous iterator of deltas, for a single reader.

    The request is aborted, and its slot and blocks are freed, as soon as an `async for` over it is left by `break`,
    `return` or an exception, a task that awaits its next delta is cancelled, it is closed, or it is garbage-collected.
    After the request has ended, these have no effect. To read some deltas now and the rest later, use
    `anext(generation)`. Iteration raises `RequestFailed` if the request ended in an error.
    """

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream
        self._closed = False
        self._loop = asyncio.get_running_loop()
        # Bound here, since a server calls it for every token.
        self.take: Callable[[], OutputDelta | None] = stream.take

    @property
    def request_id(self) -> str:
        """The id that the caller passed."""
        return self._stream.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt, including image placeholders."""
        return self._stream.prompt_token_ids

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens."""
        return self._stream.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens found in the prefix cache; known once the request has ended."""
        return self._stream.cached_tokens

    @property
    def output_tokens(self) -> int:
        """The number of tokens generated so far."""
        return self._stream.output_tokens

    @property
    def times(self) -> RequestTimes:
        """Times of submission, start and end; known once the request has ended."""
        return self._stream.times

    @property
    def reason(self) -> FinishReason | None:
        """The finish reason; None while the request runs."""
        return self._stream.reason

    @property
    def prompt_report(self) -> PromptReport | None:
        """Log-probabilities of the prompt, shared by the choices of a request; None without `prompt_logprobs`."""
        return self._stream.prompt_report

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        return _Iteration(self)

    async def __anext__(self) -> OutputDelta:
        """Return the next delta.

        Blocks: until a token or the end arrives; the leader's step deadline bounds that. Cancelling aborts the request.

        Raises:
            RequestFailed: When the request ended in an error.
        """
        if self._closed:
            raise StopAsyncIteration
        try:
            return await anext(self._stream)
        except asyncio.CancelledError:
            self.abort()
            raise

    async def aclose(self) -> None:
        """Abort the request and end the iteration; `contextlib.aclosing` calls this."""
        self._closed = True
        self.abort()

    def abort(self) -> None:
        """Abort the request and free its slot and blocks; the last delta has the finish reason. No-op after its end."""
        self._stream.abort()

    def subscribe(self, reader: Callable[[], None] | None) -> None:
        """Call `reader` when `take` may return a delta; see `TokenStream.subscribe`."""
        self._stream.subscribe(reader)

    def one_by_one(self) -> None:
        """Return one token per delta from now on; see `TokenStream.one_by_one`."""
        self._stream.one_by_one()

    def abort_soon(self) -> None:
        """Schedule an abort, for finalizers: they may run in the middle of a step or in another thread."""
        if self._stream.reason is not None:
            return
        with contextlib.suppress(RuntimeError):  # the loop, and thus the engine, is closed
            self._loop.call_soon_threadsafe(self._stream.abort)

    def __del__(self) -> None:
        if hasattr(self, "_loop"):  # __init__ fails without a running loop
            self.abort_soon()


class _Iteration:
    """The iterator of one `async for` over a generation; it is garbage-collected when the loop is left."""

    __slots__ = ("_generation",)

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def __aiter__(self) -> _Iteration:
        return self

    async def __anext__(self) -> OutputDelta:
        return await self._generation.__anext__()

    async def aclose(self) -> None:
        await self._generation.aclose()

    def __del__(self) -> None:
        self._generation.abort_soon()


class ChoiceSink(Protocol):
    """One accepted choice; for the methods see `TokenStream`."""

    request_id: str
    output_tokens: int
    times: RequestTimes
    prompt_report: PromptReport | None

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def reason(self) -> FinishReason | None: ...

    def push_token(self, token_id: int, logprob: TokenLogprob | None) -> None: ...
    def push_finish(self, finish: Finish) -> None: ...
    def fail(self, message: str) -> None: ...
    def abort(self) -> None: ...
    def deliver(self) -> None: ...


def interrupt_all(choices: Sequence[ChoiceSink], message: str) -> None:
    """End all choices of a request with an error."""
    for choice in choices:
        choice.fail(message)
        choice.abort()


class StreamTable:
    """Live choices by id and by the kernel's number; `on_failed(request_id)` is called when one cannot continue."""

    def __init__(self, on_failed: Callable[[str], None]) -> None:
        self._on_failed = on_failed
        self._by_number: dict[int, ChoiceSink] = {}
        self._numbers: dict[str, int] = {}
        self._loop = asyncio.get_running_loop()
        self._changed: dict[str, ChoiceSink] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, number: int, stream: ChoiceSink) -> None:
        self._by_number[number] = stream
        self._numbers[stream.request_id] = number
        self._idle.clear()

    def deliver_report(self, pieces: Sequence[PromptPiece]) -> None:
        """Pass a step's prompt log-probabilities to their choices, before its tokens."""
        for piece in pieces:
            stream = self._by_number.get(piece.number)
            if stream is None or stream.prompt_report is None:
                continue
            try:
                stream.prompt_report.add_piece(piece)
            except ValueError:
                logger.exception("request %s cannot go on", stream.request_id)
                stream.fail(DETOKENIZATION_FAILED)
                self._on_failed(stream.request_id)

    def deliver_step(self, result: GenerateResult) -> None:
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
            self._push_step_token(stream, token, reported)
            for further in more.get(slot, ()):
                self._call_reader(stream)  # one token per delta: clients count tokens by events
                self._push_step_token(stream, further, reported)
            self._schedule_reader(stream)

    def _push_step_token(
        self, stream: ChoiceSink, token: int, reported: deque[SlotLogprob] | tuple[()]
    ) -> None:
        logprob = None
        if reported:
            found = reported.popleft()
            logprob = TokenLogprob(token, found.logprob, found.top)
        self._push_token(stream, token, logprob)

    def _push_token(self, stream: ChoiceSink, token: int, logprob: TokenLogprob | None) -> None:
        try:
            stream.push_token(token, logprob)
        except Exception:
            logger.exception("request %s cannot go on", stream.request_id)
            stream.fail(DETOKENIZATION_FAILED)
            self._on_failed(stream.request_id)

    def deliver_token(self, number: int, token: int, logprob: TokenLogprob | None) -> None:
        """Pass a token to its choice; a pending earlier token is delivered first, in its own delta."""
        stream = self._by_number.get(number)
        if stream is None:
            return
        if stream.request_id in self._changed:
            self._call_reader(stream)
        self._push_token(stream, token, logprob)
        self._schedule_reader(stream)

    def _schedule_reader(self, stream: ChoiceSink) -> None:
        """Schedule the call of the choice's reader, after the current event together with all others."""
        if not self._changed:
            self._loop.call_soon(self._call_readers)
        self._changed[stream.request_id] = stream

    def _call_readers(self) -> None:
        changed, self._changed = self._changed, {}
        for stream in changed.values():
            self._call_reader(stream)

    def _call_reader(self, stream: ChoiceSink) -> None:
        try:
            stream.deliver()
        except Exception:
            logger.exception("the reader of request %s failed", stream.request_id)

    def deliver_finish(self, finish: Finish) -> None:
        stream = self._by_number.pop(finish.number)
        del self._numbers[finish.request_id]
        if not self._by_number:
            self._idle.set()
        try:
            stream.push_finish(finish)
        except Exception:
            logger.exception("request %s did not end well", finish.request_id)
        self._schedule_reader(stream)

    def fail_all(self, message: str, *, code: str) -> None:
        """End all choices with an error, without the kernel."""
        for request_id, number in list(self._numbers.items()):
            reason = FinishReason.ERROR
            self.deliver_finish(Finish(request_id, number, reason, RequestTimes(), message, code))

    async def wait_idle(self) -> None:
        """Wait until no request is live.

        Blocks: without limit; wrap it in `asyncio.timeout`.
        """
        await self._idle.wait()

    def request_ids(self, count: int) -> list[str]:
        return list(itertools.islice(self._numbers, count))


def int32_array(data: bytes) -> array[int]:
    """Return little-endian int32 values."""
    values = array("i")
    values.frombytes(data)
    return values
