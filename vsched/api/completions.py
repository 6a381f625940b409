"""/v1/chat/completions and /v1/completions: decode, check, generate, respond."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec
from starlette.types import Receive, Scope, Send

from vsched.aio.arrivals import check_prompt_values
from vsched.aio.grammar_checks import GRAMMAR_REFUSALS
from vsched.aio.streams import StopScope
from vsched.api import parameters
from vsched.api.bodies import RequestBodies
from vsched.api.chat_messages import arguments_characters, split_messages, with_template_calls
from vsched.api.checked_request import CheckedRequest
from vsched.api.choices import (
    AcceptedChoices,
    ChoiceStream,
    CompleteChoice,
    SseWriter,
    choice_id,
    formats_inline,
    without_logprobs,
)
from vsched.api.contract import ApiSettings, GenerationContract, ServingContract
from vsched.api.errors import ClientDisconnected, ParameterRefused
from vsched.api.formatters import ChatFormatter, CompletionFormatter, Formatter
from vsched.api.http_exchange import HttpExchange
from vsched.api.metrics import ApiMetrics, RequestRecord
from vsched.api.middleware import log_field, new_id, refusal_of, sent_id, tenant_of
from vsched.api.request_schema import ChatRequest, CompletionRequest, SamplingFields
from vsched.api.response_schema import ChatChunk, ChatResponse, CompletionResponse, Usage
from vsched.api.structured_outputs import after_reasoning, constraint_of, with_forced_calls
from vsched.api.tools.choice import ToolUse, tool_use
from vsched.api.tools.formats import call_format, reasoning_format
from vsched.api.tools.reader import CallStopScope, MessageBuilder, OutputParser
from vsched.api.unsupported import refuse_unsupported
from vsched.errors import RequestFailed, RequestRefused
from vsched.logs import REQUEST_FIELDS
from vsched.media import ImageReference, Prompt, refuse_images
from vsched.record.journal import KeptRequest, PartialOutput, RequestJournal
from vsched.worker.contract import AnswerParser

if TYPE_CHECKING:
    from vsched.api.tracing.spans import RequestTrace, Tracing

logger = logging.getLogger(__name__)

_INLINE_CHARACTERS_MAX = 16_384
"""Messages up to this length are rendered on the event loop: a switch to a thread takes longer."""
_INLINE_BYTES = 64 * 1024
"""Bodies up to this size are saved on the event loop: that is faster than a switch to a thread."""
_PART_CHARACTERS = 128
"""Rendering a message, or a part of one, takes as long as rendering this many characters of text."""
_NAMED_MAX = 8
"""Maximum number of adapters listed in the error for an unknown model."""
_RETRY_AFTER_S = {"loading": 5, "draining": 5, "stopped": 30}


def check_model(name: str | None, engine: ServingContract) -> str:
    """Adapter that a request names as its model, empty for the base model; reject any other name.

    Raises:
        ParameterRefused: With status 404.
    """
    if not name or name == engine.model_name:
        return ""
    adapters = [row["name"] for row in engine.adapters() if row["state"] == "ready"]
    if name in adapters:
        return name
    known = " or ".join([engine.model_name, *adapters[:_NAMED_MAX]])
    message = f"this model is not served here. Remedy: ask for {known}."
    raise ParameterRefused(message, param="model", code="model_not_found", status=404)


def check_ready(engine: ServingContract) -> None:
    """Reject a request while the engine is not ready.

    Raises:
        RequestRefused: With status 503.
    """
    state = engine.state
    if state not in {"ready", "degraded"}:
        raise RequestRefused(
            f"the server is {state}. Remedy: try again later; /health reports when it is ready.",
            code="not_ready",
            status=503,
            retry_after_s=_RETRY_AFTER_S.get(state, 5),
        )


def rendered(
    engine: ServingContract, messages: list[dict[str, Any]], arguments: dict[str, Any]
) -> str | Callable[[], str]:
    """Render messages with the checkpoint's template; long ones are rendered later, in the tokenizer's thread.

    Raises:
        RequestRefused: If the template rejects them.
    """

    def render() -> str:
        return engine.preprocessor.render(with_template_calls(messages), **arguments)

    return render() if _effort(messages, arguments) <= _INLINE_CHARACTERS_MAX else render


def _effort(messages: list[dict[str, Any]], arguments: dict[str, Any]) -> int:
    """Cost of rendering and tokenizing, as an equivalent number of characters in one text."""
    texts = [message["content"] for message in messages]
    parts = [part.get("text", "") for text in texts if isinstance(text, list) for part in text]
    whole = [text for text in texts if isinstance(text, str)]
    whole += [message.get("reasoning_content", "") for message in messages]
    calls = sum(arguments_characters(message.get("tool_calls", ())) for message in messages)
    calls += len(msgspec.json.encode(arguments))
    return calls + sum(map(len, whole + parts)) + _PART_CHARACTERS * (len(messages) + len(parts))


class Serving(NamedTuple):
    """Shared parts of the generating endpoints of one process; without a journal, requests are not resumed."""

    engine: ServingContract
    settings: ApiSettings
    metrics: ApiMetrics
    bodies: RequestBodies
    journal: RequestJournal | None = None
    tracing: Tracing | None = None


class CompletionEndpoint:
    """Continue a text.

    Attributes:
        path: Path of the endpoint.
        name: Name in metrics.
        operation: Name of the operation in traces.
        id_prefix: Beginning of response ids.
        kinds: Types of the body, the response, events, and errors other than OpenAI's.
    """

    path = "/v1/completions"
    name = "completions"
    operation = "text_completion"
    id_prefix = "cmpl"
    kinds: ClassVar[dict[str, type]] = {
        "request": CompletionRequest,
        "response": CompletionResponse,
        "event": CompletionResponse,
    }
    _formatter_class: ClassVar[type[Any]] = CompletionFormatter

    def __init__(self, serving: Serving) -> None:
        self._engine, self._settings, self._metrics, self._bodies = serving[:4]
        self._journal, self._tracing = serving[4:]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; every outcome is counted and answered exactly once."""
        exchange = HttpExchange(scope, receive, send)
        record = self._metrics.begin_request(self.name, tenant=tenant_of(scope))
        request_id = new_id(self.id_prefix, scope)
        ids = REQUEST_FIELDS.set({"request_id": request_id})
        trace = self._begin_trace(exchange)
        outcome = "cancelled"
        failure: RequestRefused | RequestFailed | None = None
        try:
            check_ready(self._engine)
            # The request is not stored here: prompt and images are released after preparation.
            outcome = await exchange.until_disconnect(
                self._generate(
                    exchange, record, trace, await self.read_request(exchange, request_id)
                )
            )
        except ClientDisconnected:
            outcome = "disconnected"
        except (RequestRefused, RequestFailed) as error:
            outcome = "refused" if isinstance(error, RequestRefused) else "failed"
            failure = error
            await exchange.send_error(error)
        except Exception:
            outcome, failure = "failed", RequestFailed("the server made a mistake")
            logger.exception("%s failed", self.name)
            await exchange.send_error(failure)
        finally:
            exchange.release_room()
            record.end_request(outcome)
            if trace is not None:
                trace.end_trace(outcome, failure, status=exchange.status or refusal_of(scope)[0])
            del failure  # its traceback refers to this frame
            REQUEST_FIELDS.reset(ids)

    def _begin_trace(self, exchange: HttpExchange) -> RequestTrace | None:
        """Start the trace of a request, and put its id into the response and the access log."""
        if self._tracing is None:
            return None
        scope = exchange.scope
        trace = self._tracing.begin_trace(
            scope["path"],
            scope["headers"],
            operation=self.operation,
            model=self._engine.model_name,
        )
        exchange.headers = ((b"traceparent", trace.traceparent),)
        log_field(scope, "trace_id", trace.trace_id)
        REQUEST_FIELDS.set({**REQUEST_FIELDS.get(), "trace_id": trace.trace_id})
        return trace

    async def read_request(self, exchange: HttpExchange, request_id: str) -> CheckedRequest:
        """Read and check a request.

        Raises:
            RequestRefused: If it cannot be served.
            ClientDisconnected: If the client disconnected before it was complete.
        """
        kind, tokens = self.kinds["request"], self._engine.info.context_tokens
        return await self.check(
            await self._bodies.read_body(exchange, kind, tokens=tokens), request_id
        )

    async def check(self, request: Any, request_id: str) -> CheckedRequest:
        """Check a body of the type of this endpoint.

        Raises:
            RequestRefused: If it cannot be served.
        """
        assert isinstance(request, CompletionRequest)
        prompts = parameters.completion_prompts(request, self._engine.info)
        return await self._job(
            request,
            request_id,
            prompts=prompts,
            images=(),
            max_tokens=parameters.completion_tokens(request, self._engine.info),
            logprobs=request.logprobs,
            best_of=request.best_of,
            echo=bool(request.echo),
        )

    async def _job(
        self,
        request: SamplingFields,
        request_id: str,
        *,
        prompts: Sequence[Prompt],
        images: Sequence[ImageReference],
        max_tokens: int | None,
        logprobs: int | None,
        best_of: int | None = None,
        echo: bool = False,
        calls: str = "",
        thought: str = "",
    ) -> CheckedRequest:
        """Check the common fields; `calls` is the grammar of forced calls, `thought` the end marker of reasoning."""
        adapter = check_model(request.model, self._engine)
        constraint = constraint_of(request)
        if calls:
            constraint = with_forced_calls(constraint, calls)
        if constraint and thought:
            constraint = after_reasoning(constraint, thought)
        refuse_unsupported(request)
        parameters.check_stream(request)
        n, drawn = parameters.choice_count(
            request, self._settings, prompts=len(prompts), best_of=best_of
        )
        words: tuple[tuple[int, ...], ...] = ()
        if request.bad_words:  # tokenizing the maximum number would block other connections
            words = await asyncio.to_thread(
                parameters.bad_words, request, self._engine.preprocessor
            )
        sampling = parameters.sampling_params(
            request,
            max_tokens=max_tokens,
            logprobs=0 if logprobs is None and n < drawn else logprobs,
            info=self._engine.info,
            settings=self._settings,
            bad_words=words,
            grammar=constraint.grammar if constraint else "",
            echo=echo and logprobs is not None,
        )
        return CheckedRequest(
            prompts=prompts,
            images=images,
            sampling=sampling,
            request_id=request_id,
            created=int(time.time()),
            model=adapter or self._engine.model_name,
            adapter=adapter,
            priority=request.priority,
            ttft_target_ms=request.ttft_target_ms,
            cache_salt=parameters.check_cache_salt(request),
            session=parameters.session_of(request),
            stream=bool(request.stream),
            options=parameters.response_options(
                request, sampling, echo=echo, usage_always=self._settings.usage_always
            ),
            constrained_by=constraint.param if constraint else "",
            n=n,
            drawn=drawn,
            hides_logprobs=logprobs is None and n < drawn,
            echoes=tuple(one if isinstance(one, str) else None for one in prompts) if echo else (),
        )

    async def _generate(
        self,
        exchange: HttpExchange,
        record: RequestRecord,
        trace: RequestTrace | None,
        job: CheckedRequest,
    ) -> str:
        choices = AcceptedChoices()
        if trace is not None:
            trace.choices = choices
            trace.describe(job, tenant_of(exchange.scope))
        try:
            if self._journal is not None:
                await self._keep(self._journal, exchange, job)
            await self.accept(job, choices, tenant_of(exchange.scope))
            job = msgspec.structs.replace(job, prompts=(), images=())
            exchange.release_room()
            return await self.send_response(exchange, record, choices, job)
        finally:
            choices.abort()
            if self._journal is not None:
                self._journal.delete_request(job.request_id)
            record.tokens(choices.usage)

    async def _keep(
        self, journal: RequestJournal, exchange: HttpExchange, job: CheckedRequest
    ) -> None:
        """Save a request that is about to be accepted, and number its events, so that the next engine can resume it.

        A request that does not fit into the journal is served without being saved.
        """
        body, exchange.body = exchange.body, b""
        request = KeptRequest(
            request_id=job.request_id,
            given_id=sent_id(exchange.scope),
            path=exchange.scope["path"],
            tenant=tenant_of(exchange.scope),
            created=job.created,
            seed=job.sampling.seed or 0,
            choices=len(job.prompts) * job.drawn,
            body=body,
        )
        if len(body) <= _INLINE_BYTES:
            kept = journal.keep_request(request)
        else:
            keeping = asyncio.ensure_future(asyncio.to_thread(journal.keep_request, request))
            try:
                kept = await asyncio.shield(keeping)
            except asyncio.CancelledError:
                # The thread goes on, and may save the request after `_generate` has deleted it.
                keeping.add_done_callback(lambda _: journal.delete_request(request.request_id))
                raise
        if kept and request.choices == 1:
            exchange.number_events()

    def _formatter(
        self, generation: GenerationContract, job: CheckedRequest, index: int
    ) -> Formatter:
        made: Formatter = self._formatter_class(generation, job, self._engine.preprocessor, index)
        return made

    async def accept(
        self,
        job: CheckedRequest,
        choices: AcceptedChoices,
        tenant: str,
        started: PartialOutput | None = None,
    ) -> None:
        """Submit all prompts of a request to the engine, one after the other, with their choices.

        For a request with one choice, `started` is the part that an earlier engine generated before it died.

        Raises:
            RequestRefused: If the engine refuses it, or all prompts have too many log-probabilities together; for a
                grammar, the error names the parameter.
        """
        values = 0
        try:
            for index, prompt in enumerate(job.prompts):
                first = index * job.drawn
                names = [choice_id(job.request_id, first + one) for one in range(job.drawn)]
                accepted = await self._engine.generate_choices(
                    prompt=prompt,
                    images=job.images,
                    sampling=job.sampling,
                    request_ids=names,
                    priority=job.priority,
                    ttft_target_ms=job.ttft_target_ms,
                    cache_salt=job.cache_salt,
                    tenant=tenant,
                    session=job.session,
                    adapter=job.adapter,
                    started=started,
                    make_stop_scope=job.make_stop_scope,
                )
                choices.add(accepted)
                if (report := accepted[0].prompt_report) is not None:
                    values += report.values * job.n  # each choice repeats them
                    check_prompt_values(values, self._settings.prompt_logprobs_max)
        except RequestRefused as error:
            if error.code not in GRAMMAR_REFUSALS:
                raise
            param = job.constrained_by or None
            raise ParameterRefused(error.message, param=param, code=error.code) from None

    async def send_response(
        self,
        exchange: HttpExchange,
        record: RequestRecord,
        choices: AcceptedChoices,
        job: CheckedRequest,
    ) -> str:
        """Send the response, as a stream or as one body; return the finish reason of the first choice.

        Raises:
            RequestFailed: If a choice ended in an error.
        """
        if not job.stream:
            return await self._send_whole(exchange, record, choices, job)
        streams = [
            ChoiceStream(generation, self._formatter(generation, job, index))
            for index, generation in enumerate(choices.generations)
        ]
        if exchange.numbers_events:
            # One token per event, so that events keep their numbers when they are sent again.
            streams[0].generation.one_by_one()
        await exchange.start_stream(_id_header(job))
        outcome = await SseWriter(exchange, record, streams).write_deltas()
        if job.options.usage:
            await exchange.send_event(streams[0].formatter.usage_chunk(choices.usage))
        await exchange.end_stream()
        return outcome

    async def _send_whole(
        self,
        exchange: HttpExchange,
        record: RequestRecord,
        choices: AcceptedChoices,
        job: CheckedRequest,
    ) -> str:
        drawn = await choices.collect(record, best=job.n)
        if formats_inline(drawn):
            response = self._response(drawn, choices.usage, job)
        else:
            response = await asyncio.to_thread(self._response, drawn, choices.usage, job)
        await exchange.send_json(response, headers=_id_header(job))
        first = drawn[0].deltas
        return (first[-1].finish_reason if first else None) or "stop"

    def _response(
        self, drawn: Sequence[CompleteChoice], usage: Usage, job: CheckedRequest
    ) -> object:
        """Build the non-streaming response."""
        responses: list[Any] = []
        for index, answer in enumerate(drawn):
            formatter = self._formatter(answer.generation, job, index)
            deltas = without_logprobs(answer.deltas) if job.hides_logprobs else answer.deltas
            responses.append(formatter.response(deltas, usage))
        for other in responses[1:]:
            responses[0].choices += other.choices
        return responses[0]


def _id_header(job: CheckedRequest) -> list[tuple[bytes, bytes]]:
    return [(b"x-request-id", job.request_id.encode("ascii"))]


class ChatEndpoint(CompletionEndpoint):
    """Continue a conversation, with images."""

    path = "/v1/chat/completions"
    name = "chat"
    operation = "chat"
    id_prefix = "chatcmpl"
    kinds: ClassVar[dict[str, type]] = {
        "request": ChatRequest,
        "response": ChatResponse,
        "event": ChatChunk,
    }
    _formatter_class: ClassVar[type[Any]] = ChatFormatter

    async def check(self, request: Any, request_id: str) -> CheckedRequest:
        """Check a request; long messages are rendered during preparation."""
        assert isinstance(request, ChatRequest)
        check_model(request.model, self._engine)
        refuse_unsupported(request)
        messages, images = split_messages(
            request.messages, request.mm_processor_kwargs, request.media_io_kwargs
        )
        if images:
            # Before they reach a template without image support.
            refuse_images(self._engine.info, images)
        preprocessor = self._engine.preprocessor
        arguments = parameters.template_arguments(request, preprocessor)
        template = preprocessor.chat_template
        parsed = self._parses(template)
        tools = tool_use(request, self._settings, template, parsed=parsed)
        if tools is not None:
            arguments["tools"] = tools.shown
        prompt = rendered(self._engine, messages, arguments)
        reasoning = reasoning_format(self._settings.reasoning_format, template)
        thinking = reasoning is not None and self._begins(prompt, arguments, reasoning.begin)
        limit = request.max_completion_tokens
        job = await self._job(
            request,
            request_id,
            prompts=(prompt,),
            images=images,
            max_tokens=request.max_tokens if limit is None else limit,
            logprobs=parameters.chat_logprobs(request),
            calls=tools.grammar if tools is not None else "",
            thought=reasoning.end if reasoning is not None and thinking else "",
        )
        if request.echo:
            job = msgspec.structs.replace(job, echoes=(parameters.echoed_message(request),))
        if not parsed and tools is None and reasoning is None:
            return job
        options: dict[str, Any] = {"reasoning": reasoning, "thinking": thinking}
        make_stop_scope: Callable[[], StopScope] | None = None
        make_parser: Callable[[], OutputParser | AnswerParser]
        if parsed:
            make_parser = partial(self._parser, prompt, arguments, tools)
        elif tools is None:
            make_parser = partial(OutputParser, None, **options)
        else:
            options |= {"tools": tools.schemas, "forced": bool(tools.forced)}
            make_parser = partial(OutputParser, tools.format, **options)
            make_stop_scope = partial(CallStopScope, tools.format, **options)

        hides_reasoning = request.include_reasoning is False

        # It lives as long as the answer, and must not refer to the request, which has the images.
        def message_builder(index: int) -> MessageBuilder:
            return MessageBuilder(
                make_parser(),
                choice_id=choice_id(request_id, index),
                hides_reasoning=hides_reasoning,
                single=tools is not None and tools.single,
                has_tools=tools is not None,
                forced=tools is not None and bool(tools.forced),
            )

        return msgspec.structs.replace(
            job, message_builder=message_builder, make_stop_scope=make_stop_scope
        )

    def _parses(self, template: str) -> bool:
        """True if the checkpoint has its own response parser, and no known format, which could stream, applies."""
        front, settings = self._engine.preprocessor, self._settings
        return (
            call_format(settings.tool_format, template) is None
            and reasoning_format(settings.reasoning_format, template) is None
            and settings.reasoning_format != "none"
            and front.parses_answers
        )

    def _parser(
        self, prompt: str | Callable[[], str], arguments: dict[str, Any], tools: ToolUse | None
    ) -> AnswerParser:
        """Response parser of the checkpoint for one choice; it only needs the end of the prompt."""
        front = self._engine.preprocessor
        text = self._short_prompt(arguments) if callable(prompt) else prompt
        return front.answer_parser(text, tools.shown if tools is not None else ())

    def _short_prompt(self, arguments: dict[str, Any]) -> str:
        """Render a short prompt with the same ending; empty if the template rejects it."""
        messages = [{"role": "user", "content": "a"}]
        others = {name: each for name, each in arguments.items() if name != "tools"}
        try:
            return self._engine.preprocessor.render(messages, **others)
        except RequestRefused:
            return ""

    def _begins(
        self, prompt: str | Callable[[], str], arguments: dict[str, Any], mark: str
    ) -> bool:
        """True if the prompt ends with this marker; for a prompt that is not rendered yet, a short one is checked."""
        if callable(prompt):
            prompt = self._short_prompt(arguments)
        return prompt.rstrip().endswith(mark)
