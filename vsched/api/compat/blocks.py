"""Chat deltas as a sequence of content blocks, the unit of streaming in other vendors' APIs."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from vsched.aio.streams import OutputDelta, TokenLogprob
from vsched.api.checked_request import CheckedRequest
from vsched.api.contract import GenerationContract
from vsched.api.errors import ParameterRefused
from vsched.api.formatters import chat_logprob
from vsched.api.http_exchange import StreamEvent
from vsched.api.request_schema import (
    ChatRequest,
    CommonFields,
    MediaArguments,
    ProcessorArguments,
    TemplateArguments,
)
from vsched.api.response_schema import ChatDelta, Usage
from vsched.api.tools.reader import MessageBuilder
from vsched.worker.contract import Preprocessor

Event = TypeVar("Event", bound=StreamEvent)


class BlockKind(Enum):
    """Type of a block."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


class ContentBlock:
    """One block of the output; `text` is its content, or the arguments of a tool call.

    Attributes:
        logprobs: Log-probabilities of a text's tokens, if requested.
    """

    def __init__(self, index: int, kind: BlockKind, *, call_id: str = "", name: str = "") -> None:
        self.index = index
        self.kind = kind
        self.call_id = call_id
        self.name = name
        self.logprobs: list[TokenLogprob] = []
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, text: str) -> None:
        """Append text."""
        self._pieces.append(text)


class BlockStart(NamedTuple):
    """Start of a block, still empty."""

    block: ContentBlock


class BlockDelta(NamedTuple):
    """Text appended to a block; with the tokens of a text block, if log-probabilities are requested."""

    block: ContentBlock
    text: str
    logprobs: Sequence[TokenLogprob] = ()


class BlockStop(NamedTuple):
    """End of a block."""

    block: ContentBlock


BlockStep = BlockStart | BlockDelta | BlockStop


class ContentBlocks:
    """Blocks of one output; one at a time is open.

    Attributes:
        blocks: Blocks so far.
        reasoning_tokens: Tokens in deltas with only reasoning.
        finish_reason: OpenAI's finish reason; empty before the end.
        stop_string: Stop string that ended the output.
    """

    def __init__(self, message_builder: MessageBuilder | None, *, logprobs: bool = False) -> None:
        """Create it with the parser of the output, if any; with `logprobs`, text blocks have their tokens."""
        self.blocks: list[ContentBlock] = []
        self.reasoning_tokens = 0
        self.finish_reason = ""
        self.stop_string: str | None = None
        self._message_builder = message_builder
        self._open: ContentBlock | None = None
        self._wants_logprobs = logprobs
        self._pending_logprobs: list[TokenLogprob] = []

    def add_delta(self, delta: OutputDelta) -> list[BlockStep]:
        """Convert the next delta to steps; the last delta ends the output, which has at least one block."""
        reason = delta.finish_reason
        added = [ChatDelta(content=delta.text)]
        if self._message_builder is not None:
            added = self._message_builder.added_in_order(delta.text, reason)
            reason = reason and self._message_builder.finish_reason(reason)
        if added and all(one.reasoning_content for one in added):
            self.reasoning_tokens += len(delta.token_ids)
        steps = [step for one in added for step in self._added(one)]
        if self._wants_logprobs:
            self._pending_logprobs += delta.logprobs or ()
        if reason is not None:
            self.finish_reason, self.stop_string = reason, delta.stop_string
            if not self.blocks:
                steps += self._begin_block(BlockKind.TEXT)
            if self._pending_logprobs and self._open is not None:
                steps.append(BlockDelta(self._open, ""))
            steps += self._end_block()
        return self._with_tokens(steps) if self._pending_logprobs else steps

    def _with_tokens(self, steps: list[BlockStep]) -> list[BlockStep]:
        """Attach the tokens received so far to the last text step; tokens of other blocks are dropped."""
        grown = [step for step in steps if isinstance(step, BlockDelta)]
        texts = [step for step in grown if step.block.kind is BlockKind.TEXT]
        if not grown:
            return steps  # an incomplete character, or a possible beginning of a call
        tokens, self._pending_logprobs = self._pending_logprobs, []
        if not texts:
            return steps
        last = texts[-1]
        last.block.logprobs += tokens
        return [last._replace(logprobs=tokens) if step is last else step for step in steps]

    def _added(self, added: ChatDelta) -> Iterator[BlockStep]:
        for kind, text in (
            (BlockKind.REASONING, added.reasoning_content),
            (BlockKind.TEXT, added.content),
        ):
            if text:
                yield from self._grow(kind, text)
        for call in added.tool_calls or ():
            if call.id:
                name = call.function.name or ""
                yield from self._begin_block(BlockKind.CALL, call_id=call.id, name=name)
            if call.function.arguments:
                yield from self._grow(BlockKind.CALL, call.function.arguments)

    def _grow(self, kind: BlockKind, text: str) -> Iterator[BlockStep]:
        if self._open is None or self._open.kind is not kind:
            yield from self._begin_block(kind)
        assert self._open is not None
        self._open.add(text)
        yield BlockDelta(self._open, text)

    def _begin_block(
        self, kind: BlockKind, *, call_id: str = "", name: str = ""
    ) -> Iterator[BlockStep]:
        yield from self._end_block()
        self._open = ContentBlock(len(self.blocks), kind, call_id=call_id, name=name)
        self.blocks.append(self._open)
        yield BlockStart(self._open)

    def _end_block(self) -> Iterator[BlockStep]:
        if self._open is not None:
            yield BlockStop(self._open)
        self._open = None


class BlockFormatter(ABC, Generic[Event]):
    """Formats one response from its blocks."""

    def __init__(
        self,
        generation: GenerationContract,
        job: CheckedRequest,
        preprocessor: Preprocessor,
        index: int,
    ) -> None:
        """Format a generation of this request."""
        assert not index, "requests of these APIs have a single choice"
        self._generation = generation
        self._job = job
        self._blocks = ContentBlocks(
            job.builder_of(index), logprobs=job.sampling.logprobs is not None
        )
        self._format_logprob = partial(chat_logprob, preprocessor=preprocessor)
        self._started = False

    def chunk(self, delta: OutputDelta) -> list[Event]:
        """Events of a delta, none without text; the first and last delta have additional ones."""
        events: list[Event] = [] if self._started else self._first_events()
        self._started = True
        for step in self._blocks.add_delta(delta):
            events += self._events(step)
        if self._blocks.finish_reason:
            events += self._last_events()
        return events

    def usage_chunk(self, usage: Usage) -> list[Event]:
        """Return no events: the last events have the usage."""
        del usage
        return []

    def response(self, deltas: Sequence[OutputDelta], usage: Usage) -> object:
        """Return the response that corresponds to all events of a stream."""
        del usage
        for delta in deltas:
            self._blocks.add_delta(delta)
        return self._ended()

    @abstractmethod
    def _first_events(self) -> list[Event]: ...
    @abstractmethod
    def _events(self, step: BlockStep) -> Iterable[Event]: ...
    @abstractmethod
    def _last_events(self) -> list[Event]: ...
    @abstractmethod
    def _ended(self) -> object: ...


class ChatFields(CommonFields, kw_only=True):
    """Fields with the same names as in chat requests."""

    chat_template_kwargs: TemplateArguments | None = None
    mm_processor_kwargs: ProcessorArguments | None = None
    media_io_kwargs: MediaArguments | None = None


def shared_fields(request: msgspec.Struct, *, but: AbstractSet[str]) -> dict[str, Any]:
    """Fields that have the same name in a chat request, except for `but`, whose meaning or type differs."""
    names = set(request.__struct_fields__) & set(ChatRequest.__struct_fields__)
    return {name: getattr(request, name) for name in sorted(names - but)}


_ROOT = re.compile(r"\w+")


@contextlib.contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Replace the names of chat parameters, the keys, in errors by those of the client's API.

    Raises:
        ParameterRefused: With the replaced names.
    """
    try:
        yield
    except ParameterRefused as error:
        root = _ROOT.match(error.param or "")
        if root is None or root[0] not in names:
            raise
        name = names[root[0]]
        raise ParameterRefused(
            error.message.replace(f"`{root[0]}", f"`{name}"),
            param=name + (error.param or "")[root.end() :],
            code=error.code,
            status=error.status,
        ) from None
