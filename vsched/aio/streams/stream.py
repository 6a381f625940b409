"""The stream of a choice: detokenization, stop strings, and a buffer of deltas for a reader."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Protocol

import msgspec

from vsched.aio.streams.prompt_report import PromptReport
from vsched.errors import RequestFailed
from vsched.kernel.commands import Finish, RequestTimes
from vsched.types import FinishReason
from vsched.worker.contract import Detokenizer

logger = logging.getLogger(__name__)


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
BROKEN = "the answer could not be turned into text"
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
        ...

    def split_rest(self, *, cut: bool) -> list[tuple[str, bool]]:
        """Return the parts held back until the end; `cut` is True if the length limit ended the choice."""
        ...


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

    def push(self, text: str, *, exempt: bool = False) -> tuple[str, bool]:
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


def broken(finish: Finish, message: str) -> Finish:
    """Return the finish with an internal error."""
    return msgspec.structs.replace(
        finish, reason=FinishReason.ERROR, message=message, code="internal_error"
    )


class TokenStream:
    """One accepted choice, read as an asynchronous iterator of deltas by a single reader.

    Tokens that arrive faster than they are read are merged into one delta. Iteration raises `RequestFailed` if the
    request ended in an error.

    Attributes:
        prompt_report: Log-probabilities of the prompt, shared by the choices of a request; None unless requested.
    """

    def __init__(
        self,
        request_id: str,
        *,
        prompt_token_ids: list[int],
        detokenizer: Detokenizer,
        stop: tuple[str, ...],
        stop_token_ids: frozenset[int],
        include_stop: bool = False,
        min_tokens: int = 0,
        stop_scope: StopScope | None = None,
        logprobs: bool,
        on_stop: Callable[[str, FinishReason], None],
        on_end: Callable[[], None],
        prompt_report: PromptReport | None = None,
        prompt_only: bool = False,
    ) -> None:
        """Create a stream; with `prompt_only` sampled tokens are dropped."""
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.output_tokens = 0
        self.times = RequestTimes()
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop, include=include_stop)
        self._has_stops = bool(stop)
        self._min_tokens = min_tokens
        self._stop_scope = stop_scope
        self._silent_token_ids = frozenset() if include_stop else stop_token_ids
        self.prompt_report = prompt_report
        self._prompt_only = prompt_only
        self._on_stop = on_stop
        self._on_end = on_end
        self._text: list[str] = []
        self._single = False
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] | None = [] if logprobs else None
        self._stopped = False
        self._broken = ""
        self._finish: Finish | None = None
        self._ended = False
        self._is_held = False
        self._changed = asyncio.Event()
        self._reader: Callable[[], None] | None = None

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens, including image placeholders."""
        return len(self.prompt_token_ids)

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens found in the prefix cache; known once the request has ended."""
        return self.times.cached_tokens

    @property
    def reason(self) -> FinishReason | None:
        """The finish reason; None while it runs."""
        return None if self._finish is None else self._finish.reason

    def push(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Add the next token."""
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

    def finish(self, finish: Finish) -> None:
        """Handle the end; called once."""
        assert self._finish is None, "a request has two terminal replies"
        self._finish = finish
        self.times = finish.times
        try:
            self._finish = self._conclude(finish)
        except Exception:
            # The reader must not take the text so far for the complete output.
            logger.exception("the end of request %s could not be turned into text", self.request_id)
            self._finish = broken(finish, BROKEN)
        finally:
            self._changed.set()
            self._on_end()

    def _conclude(self, finish: Finish) -> Finish:
        """Add the text held back, and return the finish with its final reason."""
        if self._broken:
            return broken(finish, self._broken)
        if finish.message:
            return finish  # the reader gets only the error
        if self._prompt_only and finish.reason is FinishReason.STOP:
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
            said, stopped = self._matcher.push(text, exempt=exempt)
            out += said
            if stopped:
                return out, True
        return out, False

    def give_up(self, message: str) -> None:
        """Drop further tokens, and end with this error whatever the finish reason is."""
        self._broken = message
        self._stopped = True

    def abort(self) -> None:
        """Abort the request and free its resources; no-op after its end."""
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
        """Return the next delta.

        Blocks: until a token or the end arrives; the leader's step deadline bounds that.

        Raises:
            RequestFailed: When the request ended in an error.
        """
        if self._ended:
            raise StopAsyncIteration
        await self._changed.wait()
        return self._take()

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
        return self._take()

    def _waits_for_prompt(self) -> bool:
        """Return True if the prompt's log-probabilities are incomplete; then call the reader once they are complete."""
        report = self.prompt_report
        finish = self._finish
        failed = finish is not None and (finish.reason in _FAILURES or bool(finish.message))
        if report is None or report.is_whole or failed:
            return False
        if not self._is_held:
            self._is_held = True
            report.when_whole(partial(asyncio.get_running_loop().call_soon, self.deliver))
        return True

    def _take(self) -> OutputDelta:
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
