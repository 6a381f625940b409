"""How deltas become OpenAI bodies: one formatter for chat, one for plain completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET

from vsched.aio.streams.stream import OutputDelta, TokenLogprob
from vsched.api.contract import Generation
from vsched.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    ChatResponse,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    PromptDetails,
    TopLogprob,
    Usage,
)
from vsched.api.tools.wording import AnswerWording
from vsched.worker.contract import Preprocessor

_LOGPROB_MIN = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON cannot write."""
_ENCODER = msgspec.json.Encoder()
_BLANK = "\x00"
"""A text that no name has."""


def usage_of(generation: Generation) -> Usage:
    """Return the usage so far."""
    return Usage(
        prompt_tokens=generation.prompt_tokens,
        completion_tokens=generation.output_tokens,
        total_tokens=generation.prompt_tokens + generation.output_tokens,
        prompt_tokens_details=PromptDetails(generation.cached_tokens),
    )


class Formatter(Protocol):
    """Words deltas; one for each request, since it remembers what came before."""

    def chunk(self, delta: OutputDelta) -> object | None:
        """Return the event for a delta, to be encoded as JSON; None when there is nothing to say yet."""
        ...

    def usage_chunk(self, usage: Usage) -> object:
        """Return the event that carries only the usage."""
        ...

    def whole(self, deltas: Sequence[OutputDelta], usage: Usage) -> object:
        """Return the response that holds everything."""
        ...


class _Form:
    """Events that differ in their text alone: everything around it is encoded once."""

    def __init__(self, blank: object) -> None:
        """Take the event whose text is `_BLANK`."""
        self._before, self._after = _ENCODER.encode(blank).split(_ENCODER.encode(_BLANK))

    def fill(self, text: str) -> msgspec.Raw:
        """Return the event with this text."""
        return msgspec.Raw(self._before + _ENCODER.encode(text) + self._after)


def _is_text_alone(delta: OutputDelta) -> bool:
    return bool(delta.text) and delta.finish_reason is None and delta.logprobs is None


def _finish_reason(deltas: Sequence[OutputDelta]) -> str:
    return (deltas[-1].finish_reason if deltas else None) or "stop"


def _is_silent(delta: OutputDelta) -> bool:
    return not delta.text and not delta.logprobs and delta.finish_reason is None


class ChatFormatter:
    """Words chat completions."""

    def __init__(
        self,
        request_id: str,
        *,
        created: int,
        model: str,
        preprocessor: Preprocessor,
        wording: AnswerWording | None = None,
    ) -> None:
        """Take `wording` where the answer may hold more than content."""
        self._id = request_id
        self._created = created
        self._model = model
        self._preprocessor = preprocessor
        self._wording = wording
        self._begun = False
        blank = ChatChunkChoice(ChatDelta(content=_BLANK), None, None)
        self._form = _Form(ChatChunk(request_id, created, model, [blank]))

    def chunk(self, delta: OutputDelta) -> ChatChunk | msgspec.Raw | None:
        if self._wording is not None:
            return self._worded(delta, self._wording)
        if self._begun:
            if _is_text_alone(delta):
                return self._form.fill(delta.text)
            if _is_silent(delta):
                return None
        content = ChatDelta(
            role=UNSET if self._begun else "assistant",
            content=delta.text if delta.text or not self._begun else UNSET,
        )
        self._begun = True
        choice = ChatChunkChoice(content, delta.finish_reason, self._logprobs([delta]))
        return ChatChunk(self._id, self._created, self._model, [choice])

    def _worded(self, delta: OutputDelta, wording: AnswerWording) -> ChatChunk:
        added = wording.added(delta.text, is_last=delta.finish_reason is not None)
        if not self._begun:
            self._begun, added.role = True, "assistant"
        reason = delta.finish_reason and wording.finish_reason(delta.finish_reason)
        choice = ChatChunkChoice(added, reason, self._logprobs([delta]))
        return ChatChunk(self._id, self._created, self._model, [choice])

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return ChatChunk(self._id, self._created, self._model, [], usage)

    def whole(self, deltas: Sequence[OutputDelta], usage: Usage) -> ChatResponse:
        text = "".join(delta.text for delta in deltas)
        message, reason = ChatMessage(text), _finish_reason(deltas)
        if self._wording is not None:
            message = self._wording.message(text)
            reason = self._wording.finish_reason(reason)
        choice = ChatChoice(message, reason, self._logprobs(deltas))
        return ChatResponse(self._id, self._created, self._model, [choice], usage)

    def _logprobs(self, deltas: Sequence[OutputDelta]) -> ChatLogprobs | None:
        if all(delta.logprobs is None for delta in deltas):
            return None
        return ChatLogprobs(
            [self._token(token) for delta in deltas for token in delta.logprobs or ()]
        )

    def _token(self, token: TokenLogprob) -> ChatLogprob:
        top = [self._alternative(token_id, logprob) for token_id, logprob in token.top]
        own = self._alternative(token.token_id, token.logprob)
        return ChatLogprob(own.token, own.logprob, own.bytes, top)

    def _alternative(self, token_id: int, logprob: float) -> TopLogprob:
        content = self._preprocessor.token_bytes(token_id)
        return TopLogprob(
            content.decode("utf-8", "replace"), max(logprob, _LOGPROB_MIN), list(content)
        )


class CompletionFormatter:
    """Words plain completions."""

    def __init__(
        self, request_id: str, *, created: int, model: str, preprocessor: Preprocessor
    ) -> None:
        self._id = request_id
        self._created = created
        self._model = model
        self._preprocessor = preprocessor
        self._offset = 0
        blank = CompletionChoice(_BLANK, None, None)
        self._form = _Form(CompletionResponse(request_id, created, model, [blank]))

    def chunk(self, delta: OutputDelta) -> CompletionResponse | msgspec.Raw | None:
        if _is_text_alone(delta):
            return self._form.fill(delta.text)
        if _is_silent(delta):
            return None
        choice = CompletionChoice(delta.text, delta.finish_reason, self._logprobs([delta]))
        return CompletionResponse(self._id, self._created, self._model, [choice])

    def usage_chunk(self, usage: Usage) -> CompletionResponse:
        return CompletionResponse(self._id, self._created, self._model, [], usage)

    def whole(self, deltas: Sequence[OutputDelta], usage: Usage) -> CompletionResponse:
        text = "".join(delta.text for delta in deltas)
        choice = CompletionChoice(text, _finish_reason(deltas), self._logprobs(deltas))
        return CompletionResponse(self._id, self._created, self._model, [choice], usage)

    def _logprobs(self, deltas: Sequence[OutputDelta]) -> CompletionLogprobs | None:
        if all(delta.logprobs is None for delta in deltas):
            return None
        result = CompletionLogprobs([], [], [], [])
        for delta in deltas:
            for token in delta.logprobs or ():
                text = self._text(token.token_id)
                result.tokens.append(text)
                result.token_logprobs.append(max(token.logprob, _LOGPROB_MIN))
                result.top_logprobs.append(
                    {self._text(other): max(logprob, _LOGPROB_MIN) for other, logprob in token.top}
                )
                result.text_offset.append(self._offset)
                self._offset += len(text)
        return result

    def _text(self, token_id: int) -> str:
        return self._preprocessor.token_bytes(token_id).decode("utf-8", "replace")
