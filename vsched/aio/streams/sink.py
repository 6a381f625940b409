"""Receivers of the tokens and the end of an accepted choice: a stream here, or a relay to an API process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from vsched.aio.streams.prompt_report import PromptReport
from vsched.aio.streams.stream import TokenLogprob
from vsched.kernel.commands import Finish, RequestTimes
from vsched.types import FinishReason, SamplingParams


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


class Answering(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of a choice's receiver.

    Attributes:
        stop_token_ids: Stop tokens of the request and of the checkpoint.
        on_stop: Ends the choice with this id early.
        on_end: Called at its end.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    report: PromptReport | None
    on_stop: Callable[[str, FinishReason], None]
    on_end: Callable[[], None]


def interrupt_all(choices: Sequence[AnswerSink], message: str) -> None:
    """End all choices of a request with an error."""
    for answer in choices:
        answer.give_up(message)
        answer.abort()
