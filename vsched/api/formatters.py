"""Convert deltas to OpenAI bodies: one formatter for chats, one for text completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from vsched.aio.streams import OutputDelta, TokenLogprob
from vsched.api.checked_request import CheckedRequest
from vsched.api.contract import GenerationContract
from vsched.api.response_schema import (
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
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
    Usage,
)
from vsched.worker.contract import Detokenizer, Preprocessor

_LOGPROB_MIN = -9999.0
"""OpenAI's substitute for minus infinity, which JSON cannot represent."""
_ENCODER = msgspec.json.Encoder()
_BLANK = "\x00"
"""A text that cannot occur in a name."""


def usage_of(*families: Sequence[GenerationContract]) -> Usage:
    """Usage so far, by prompt: each prompt counts once, with the cached tokens of its first choice."""
    prompt = sum(choices[0].prompt_tokens for choices in families)
    output = sum(one.output_tokens for choices in families for one in choices)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=output,
        total_tokens=prompt + output,
        prompt_tokens_details=PromptDetails(sum(choices[0].cached_tokens for choices in families)),
    )


class Formatter(Protocol):
    """Formats deltas; stateful, so there is one for each choice."""

    def chunk(self, delta: OutputDelta) -> object:
        """Return the event for a delta, to be encoded as JSON; None if the delta has only tool-call markup.

        All other deltas have an event, even without text, because clients count tokens by events.
        """
        ...

    def usage_chunk(self, usage: Usage) -> object:
        """Return the event with the usage only."""
        ...

    def response(self, deltas: Sequence[OutputDelta], usage: Usage) -> object:
        """Return the complete response."""
        ...


class _Form:
    """Events that differ only in their text: everything around it is encoded once."""

    def __init__(self, blank: object) -> None:
        """Encode an event whose text is `_BLANK`."""
        self._before, self._after = _ENCODER.encode(blank).split(_ENCODER.encode(_BLANK))

    def fill(self, text: str) -> msgspec.Raw:
        """Encode the event with this text."""
        return msgspec.Raw(self._before + _ENCODER.encode(text) + self._after)


def token_text(token_id: int, preprocessor: Preprocessor, *, as_id: bool = False) -> str:
    r"""Name of a token: its text, or `bytes:\xe2\x80` as in OpenAI's API if it is not valid UTF-8."""
    if as_id:
        return f"token_id:{token_id}"
    spelled = preprocessor.token_bytes(token_id)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return f"bytes:{repr(spelled)[2:-1]}"


def chat_logprob(
    token: TokenLogprob, preprocessor: Preprocessor, *, as_id: bool = False
) -> ChatLogprob:
    """Log-probability of a token and of its alternatives, in the chat format."""

    def alternative(token_id: int, logprob: float) -> TopLogprob:
        content = list(preprocessor.token_bytes(token_id))
        text = token_text(token_id, preprocessor, as_id=as_id)
        return TopLogprob(text, max(logprob, _LOGPROB_MIN), content)

    own = alternative(token.token_id, token.logprob)
    top = [alternative(token_id, logprob) for token_id, logprob in token.top]
    return ChatLogprob(own.token, own.logprob, own.bytes, top)


def text_of(preprocessor: Preprocessor, token_ids: Sequence[int]) -> str:
    """Detokenize all tokens, including special ones."""
    text = b"".join(map(preprocessor.token_bytes, token_ids)).decode("utf-8", "replace")
    plain = preprocessor.detokenize(token_ids)
    # Some tokenizers start every text with a space, which is not part of it.
    return plain if text == f" {plain}" else text


def _or_null(token_ids: list[int] | UnsetType | None) -> list[int] | None:
    return None if token_ids is UNSET else token_ids


def _finish_reason(deltas: Sequence[OutputDelta]) -> str:
    return (deltas[-1].finish_reason if deltas else None) or "stop"


class _Formatting:
    """Common part of the two formatters.

    Attributes:
        options: Contents of the response besides text.
    """

    def __init__(
        self,
        generation: GenerationContract,
        job: CheckedRequest,
        preprocessor: Preprocessor,
        index: int = 0,
    ) -> None:
        """Format the choice of this index.

        `_echo` is the start of the content of a chat, the assistant message that is continued, or the text of a
        repeated prompt; None for a prompt of token ids.
        """
        self.options = job.options
        self._index = index
        self._generation = generation
        self._id = job.request_id
        self._created = job.created
        self._model = job.model
        self._preprocessor = preprocessor
        self._message_builder = job.builder_of(index)
        self._echo: str | None = job.echoes[index // job.n] if job.echoes else None
        self._started = False
        self._bare = not (job.options.running_usage or job.options.token_ids)
        self._form = _Form(self._event(_BLANK))

    def _event(self, text: str) -> object:
        """Return an event with only a text."""
        raise NotImplementedError

    def _is_bare(self, delta: OutputDelta) -> bool:
        """True if the event of a delta has only a text."""
        return self._bare and delta.finish_reason is None and delta.logprobs is None

    def _running_usage(self) -> Usage | UnsetType:
        return usage_of([self._generation]) if self.options.running_usage else UNSET

    def _token_ids(self, deltas: Sequence[OutputDelta]) -> list[int] | UnsetType:
        if not self.options.token_ids:
            return UNSET
        return [token_id for delta in deltas for token_id in delta.token_ids]

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        """Token ids of the prompt, for the first event or the complete response."""
        wanted = self.options.token_ids and not self._started
        return list(self._generation.prompt_token_ids) if wanted else UNSET

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        """Log-probabilities of the prompt; only for complete responses."""
        count, report = self.options.prompt_logprobs, self._generation.prompt_report
        if count is None or report is None:
            return None
        found: PromptLogprobs = [None]
        for token in report.tokens():
            top = {
                str(token_id): self._prompt_logprob(token_id, logprob, rank)
                for rank, (token_id, logprob) in enumerate(token.top[:count], 1)
            }
            own = self._prompt_logprob(token.token_id, token.logprob, token.rank)
            found.append({**top, str(token.token_id): own})
        return found

    def _prompt_logprob(self, token_id: int, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(max(logprob, _LOGPROB_MIN), rank, self._token_text(token_id))

    def _token_text(self, token_id: int) -> str:
        return token_text(token_id, self._preprocessor, as_id=self.options.tokens_as_ids)


class ChatFormatter(_Formatting):
    """Formats chat completions."""

    def _event(self, text: str) -> ChatChunk:
        choice = ChatChunkChoice(ChatDelta(content=text), None, None, self._index)
        return ChatChunk(self._id, self._created, self._model, [choice])

    def chunk(self, delta: OutputDelta) -> ChatChunk | msgspec.Raw | None:
        if self._started and self._message_builder is None and self._is_bare(delta):
            return self._form.fill(delta.text)
        added, reason = ChatDelta(content=delta.text), delta.finish_reason
        if self._message_builder is not None:
            added = self._message_builder.added(delta.text, reason)
            reason = reason and self._message_builder.finish_reason(reason)
            if self._started and self._message_builder.is_silent and self._is_bare(delta):
                return None
        if not self._started:
            added.role = "assistant"
            if self._echo:
                added.content = self._echo + (added.content or "")
        choice = ChatChunkChoice(
            added,
            reason,
            self._logprobs([delta]),
            self._index,
            token_ids=self._token_ids([delta]),
        )
        chunk = ChatChunk(
            self._id,
            self._created,
            self._model,
            [choice],
            self._running_usage(),
            prompt_token_ids=self._prompt_token_ids(),
        )
        self._started = True
        return chunk

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return ChatChunk(self._id, self._created, self._model, [], usage)

    def response(self, deltas: Sequence[OutputDelta], usage: Usage) -> ChatResponse:
        text = "".join(delta.text for delta in deltas)
        message, reason = ChatMessage(text), _finish_reason(deltas)
        if self._message_builder is not None:
            message = self._message_builder.message(text, reason)
            reason = self._message_builder.finish_reason(reason)
        if self._echo:
            message.content = self._echo + (message.content or "")
        choice = ChatChoice(
            message,
            reason,
            self._logprobs(deltas),
            self._index,
            token_ids=_or_null(self._token_ids(deltas)),
        )
        return ChatResponse(
            self._id,
            self._created,
            self._model,
            [choice],
            usage,
            prompt_token_ids=_or_null(self._prompt_token_ids()),
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _logprobs(self, deltas: Sequence[OutputDelta]) -> ChatLogprobs | None:
        if all(delta.logprobs is None for delta in deltas):
            return None
        tokens = [token for delta in deltas for token in delta.logprobs or ()]
        as_ids = self.options.tokens_as_ids
        return ChatLogprobs([chat_logprob(one, self._preprocessor, as_id=as_ids) for one in tokens])


class TextOffsets:
    """Computes the offset of each token in a text, in characters.

    A token that continues a character has the offset of that character.
    """

    def __init__(self, detokenizer: Detokenizer, *, start: int = 0) -> None:
        """Start at offset `start`."""
        self._detokenizer = detokenizer
        self._at = start

    def next(self, token_id: int) -> int:
        """Return the offset of the next token."""
        begin = self._at
        self._at += len(self._detokenizer.push((token_id,)))
        return begin


class CompletionFormatter(_Formatting):
    """Formats text completions."""

    _length = 0
    _offsets: TextOffsets | None = None

    def _event(self, text: str) -> CompletionResponse:
        choice = CompletionChoice(text, None, None, self._index)
        return CompletionResponse(self._id, self._created, self._model, [choice])

    def chunk(self, delta: OutputDelta) -> CompletionResponse | msgspec.Raw:
        if self._is_bare(delta) and (self._started or not self.options.echo):
            return self._form.fill(delta.text)
        choice = self._choice(delta.text, delta.finish_reason, [delta])
        self._started = True
        usage = self._running_usage()
        return CompletionResponse(self._id, self._created, self._model, [choice], usage)

    def usage_chunk(self, usage: Usage) -> CompletionResponse:
        return CompletionResponse(self._id, self._created, self._model, [], usage)

    def response(self, deltas: Sequence[OutputDelta], usage: Usage) -> CompletionResponse:
        text = "".join(delta.text for delta in deltas)
        choice = self._choice(text, _finish_reason(deltas), deltas)
        choice.prompt_logprobs = self._prompt_logprobs()
        choice.token_ids = _or_null(choice.token_ids)
        choice.prompt_token_ids = _or_null(choice.prompt_token_ids)
        return CompletionResponse(self._id, self._created, self._model, [choice], usage)

    def _choice(
        self, text: str, finish_reason: str | None, deltas: Sequence[OutputDelta]
    ) -> CompletionChoice:
        echoed = self._echoed()
        self._length += len(echoed) + len(text)
        logprobs = self._logprobs(deltas, echoed)
        if logprobs is not None and finish_reason is not None:
            # Tokens of a stop string are not part of the text.
            logprobs.text_offset = [min(each, self._length) for each in logprobs.text_offset]
        return CompletionChoice(
            echoed + text,
            finish_reason,
            logprobs,
            self._index,
            token_ids=self._token_ids(deltas),
            prompt_token_ids=self._prompt_token_ids(),
        )

    def _logprobs(self, deltas: Sequence[OutputDelta], echoed: str) -> CompletionLogprobs | None:
        if all(delta.logprobs is None for delta in deltas):
            return None
        result = CompletionLogprobs([], [], [], [])
        report = self._generation.prompt_report
        if self.options.echo and not self._started and report is not None:
            offsets = TextOffsets(self._preprocessor.detokenizer(special=self._echo is None))
            first, count = self._generation.prompt_token_ids[0], self.options.echo_logprobs
            self._add(result, first, None, None, offsets)
            for one in report.tokens():
                top = self._top(TokenLogprob(one.token_id, one.logprob, one.top[:count]))
                self._add(result, one.token_id, one.logprob, top, offsets)
        if self._offsets is None:
            special = self.options.shows_special
            detokenizer = self._preprocessor.detokenizer(special=special)
            self._offsets = TextOffsets(detokenizer, start=len(echoed))
        for delta in deltas:
            for token in delta.logprobs or ():
                self._add(result, token.token_id, token.logprob, self._top(token), self._offsets)
        return result

    def _echoed(self) -> str:
        """Prompt text for the first event or the complete response, if it is echoed."""
        if self._started or not self.options.echo:
            return ""
        if self._echo is not None:
            return self._echo
        return text_of(self._preprocessor, self._generation.prompt_token_ids)

    def _add(
        self,
        result: CompletionLogprobs,
        token_id: int,
        logprob: float | None,
        top: dict[str, float] | None,
        offsets: TextOffsets,
    ) -> None:
        result.tokens.append(self._token_text(token_id))
        result.token_logprobs.append(None if logprob is None else max(logprob, _LOGPROB_MIN))
        result.top_logprobs.append(top)
        result.text_offset.append(offsets.next(token_id))

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        """Map the sampled token and the alternatives by name to log-probabilities; a duplicate name becomes an id."""
        others = [each for each in token.top if each[0] != token.token_id]
        found: dict[str, float] = {}
        for token_id, logprob in [(token.token_id, token.logprob), *others]:
            name = self._token_text(token_id)
            if name in found:
                name = token_text(token_id, self._preprocessor, as_id=True)
            found[name] = max(logprob, _LOGPROB_MIN)
        return found
