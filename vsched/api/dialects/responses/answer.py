"""Responses of OpenAI's Responses API, streaming and non-streaming."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from vsched.aio.streams.stream import OutputDelta, TokenLogprob
from vsched.api.contract import Generation
from vsched.api.dialects.blocks import (
    AnswerBlock,
    AnswerBlocks,
    BlockBegins,
    BlockEnds,
    BlockGrows,
    BlockKind,
    BlockStep,
)
from vsched.api.dialects.responses import events as made
from vsched.api.dialects.responses.schema import ResponsesFormat, ResponsesRequest, TextOptions
from vsched.api.responses import ChatLogprob, Usage
from vsched.api.wire_forms import NumberedEvent

_PREFIXES = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.CALL: "fc"}


class ResponsesFormatter:
    """Formats one response; it repeats settings of the request `requested`; `reported` formats the logprob of a token."""

    def __init__(
        self,
        generation: Generation,
        *,
        created: int,
        model: str,
        blocks: AnswerBlocks,
        requested: ResponsesRequest,
        reported: Callable[[TokenLogprob], ChatLogprob],
    ) -> None:
        self._generation = generation
        self._created = created
        self._model = model
        self._blocks = blocks
        self._requested = requested
        self._reported = reported
        self._started = False

    def chunk(self, delta: OutputDelta) -> list[NumberedEvent]:
        """Events of a delta, none without text; the first and last delta have additional ones."""
        events: list[NumberedEvent] = []
        if not self._started:
            response = self._response("in_progress", [])
            events += [
                made.ResponseCreated(response=response),
                made.ResponseInProgress(response=response),
            ]
            self._started = True
        for step in self._blocks.take(delta):
            events += self._events(step)
        if self._blocks.finish_reason:
            ended = self._ended()
            cut = ended.incomplete_details is not None
            events.append(
                made.ResponseIncomplete(response=ended)
                if cut
                else made.ResponseCompleted(response=ended)
            )
        return events

    def usage_chunk(self, usage: Usage) -> list[NumberedEvent]:
        """Return no events: the last event has the usage."""
        del usage
        return []

    def whole(self, deltas: Sequence[OutputDelta], usage: Usage) -> made.ResponseObject:
        """Return the response that corresponds to all events of a stream."""
        del usage
        for delta in deltas:
            self._blocks.take(delta)
        return self._ended()

    def _events(self, step: BlockStep) -> Iterator[NumberedEvent]:
        block = step.block
        is_call = block.kind is BlockKind.CALL
        own, index = self._id(block), block.index
        match step:
            case BlockBegins():
                item = self._item(block, "in_progress", [])
                yield made.OutputItemAdded(output_index=index, item=item)
                if not is_call:
                    yield made.ContentPartAdded(
                        item_id=own, output_index=index, part=_empty_part(block)
                    )
            case BlockGrows(text=text, logprobs=logprobs):
                event = made.DELTAS[block.kind](item_id=own, output_index=index, delta=text)
                if isinstance(event, made.OutputTextDelta):
                    event.logprobs = list(map(self._reported, logprobs))
                yield event
            case BlockEnds():
                yield self._done(block)
                if not is_call:
                    yield made.ContentPartDone(
                        item_id=own, output_index=index, part=self._part(block)
                    )
                yield made.OutputItemDone(output_index=index, item=self._ended_item(block))

    def _done(self, block: AnswerBlock) -> NumberedEvent:
        own, index, text = self._id(block), block.index, block.text
        match block.kind:
            case BlockKind.TEXT:
                logprobs = list(map(self._reported, block.logprobs))
                return made.OutputTextDone(
                    item_id=own, output_index=index, text=text, logprobs=logprobs
                )
            case BlockKind.REASONING:
                return made.ReasoningDone(item_id=own, output_index=index, text=text)
            case BlockKind.CALL:
                return made.ArgumentsDone(
                    item_id=own, output_index=index, arguments=text, name=block.name
                )

    def _ended_item(self, block: AnswerBlock) -> made.OutputItem:
        cut = self._blocks.finish_reason == "length" and block is self._blocks.blocks[-1]
        parts: list[made.OutputPart] = [] if block.kind is BlockKind.CALL else [self._part(block)]
        return self._item(block, "incomplete" if cut else "completed", parts)

    def _item(
        self, block: AnswerBlock, status: str, parts: list[made.OutputPart]
    ) -> made.OutputItem:
        own = self._id(block)
        match block.kind:
            case BlockKind.TEXT:
                return made.MessageItem(own, status, list(parts))
            case BlockKind.REASONING:
                return made.ReasoningItem(own, status, list(parts))
            case BlockKind.CALL:
                text = "" if status == "in_progress" else block.text
                return made.CallItem(own, status, block.call_id, block.name, text)

    def _part(self, block: AnswerBlock) -> made.OutputPart:
        if block.kind is BlockKind.TEXT:
            return made.OutputTextPart(
                block.text, logprobs=list(map(self._reported, block.logprobs))
            )
        return made.ReasoningPart(block.text)

    def _id(self, block: AnswerBlock) -> str:
        return f"{_PREFIXES[block.kind]}_{self._generation.request_id}_{block.index}"

    def _ended(self) -> made.ResponseObject:
        output = [self._ended_item(block) for block in self._blocks.blocks]
        if self._blocks.finish_reason != "length":
            return self._response("completed", output)
        response = self._response("incomplete", output)
        response.incomplete_details = made.IncompleteDetails("max_output_tokens")
        return response

    def _response(self, status: str, output: list[made.OutputItem]) -> made.ResponseObject:
        requested = self._requested
        has_ended = status != "in_progress"
        return made.ResponseObject(
            id=self._generation.request_id,
            created_at=self._created,
            status=status,
            model=self._model,
            output=output,
            usage=self._usage() if has_ended else None,
            instructions=requested.instructions,
            max_output_tokens=requested.max_output_tokens,
            metadata=requested.metadata or {},
            parallel_tool_calls=requested.parallel_tool_calls is not False,
            reasoning=requested.reasoning,
            temperature=requested.temperature,
            text=_with_format(requested.text),
            tool_choice="auto" if requested.tool_choice is None else requested.tool_choice,
            tools=requested.tools or [],
            top_logprobs=requested.top_logprobs or 0,
            top_p=requested.top_p,
            user=requested.user,
        )

    def _usage(self) -> made.ResponsesUsage:
        generation = self._generation
        return made.ResponsesUsage(
            generation.prompt_tokens,
            made.InputDetails(generation.cached_tokens),
            generation.output_tokens,
            made.OutputDetails(self._blocks.reasoning_tokens),
            generation.prompt_tokens + generation.output_tokens,
        )


def _with_format(text: TextOptions | None) -> TextOptions:
    sent = text or TextOptions()
    return msgspec.structs.replace(sent, format=sent.format or ResponsesFormat("text"))


def _empty_part(block: AnswerBlock) -> made.OutputPart:
    is_text = block.kind is BlockKind.TEXT
    return made.OutputTextPart("") if is_text else made.ReasoningPart("")
