"""Spans of requests, by OpenTelemetry's conventions for HTTP servers and generative AI.

The span of a request starts with it, because responses and log lines have its ids. Everything else is added once, at
the end, from the times in `RequestTimes`. The SDK sends spans in a thread of its own, in batches, from a queue of at
most 2048 (`OTEL_BSP_MAX_QUEUE_SIZE`), and drops further ones.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from vsched.api.checked_request import CheckedRequest
from vsched.api.choices import AcceptedChoices
from vsched.api.contract import GenerationContract
from vsched.errors import RequestFailed, RequestRefused
from vsched.kernel.commands import RequestTimes
from vsched.types import FinishReason

logger = logging.getLogger(__name__)
CLOSE_S = 1.0
"""Maximum time for sending the last spans when the server stops."""
CHOICES_MAX = 8
"""Choices of a request with spans for their phases; further ones count in its attributes only."""
_FAILED = (FinishReason.ERROR, FinishReason.ABORT)
_UNFINISHED = {"disconnected": "the client disconnected", "cancelled": "the server stopped"}
_SDK_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
)
"""Loggers of the SDK that report lost spans, one line for each attempt or span."""


class _Trouble(logging.Filter):
    """Replaces the SDK's log lines about lost spans by one warning, until spans arrive again."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        self._is_reported = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Log a warning in place of the first record; drop all records."""
        if record.levelno >= logging.WARNING and not self._is_reported:
            self._is_reported = True
            logger.warning(
                "traces do not reach %s, and spans may be lost: %s Remedy: check server.otlp_endpoint and its server",
                self._address,
                record.getMessage(),
            )
        return False

    def sent(self) -> None:
        """Note that spans arrived."""
        if self._is_reported:
            self._is_reported = False
            logger.info("traces reach %s again", self._address)


class _Exporter(OTLPSpanExporter):
    """The SDK's exporter, with one warning per outage."""

    def __init__(self, url: str, trouble: _Trouble) -> None:
        super().__init__(endpoint=url)
        self._trouble = trouble

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is SpanExportResult.SUCCESS:
            self._trouble.sent()
        return result


class Tracing:
    """Creates the spans of one process and sends them to a collector."""

    def __init__(self, url: str) -> None:
        """Send to the URL; all else is set by the SDK's environment variables.

        Raises:
            ValueError: If one of these is not valid.
        """
        self._trouble = _Trouble(urlsplit(url).netloc.rpartition("@")[2])
        self._exporter = _Exporter(url, self._trouble)
        resource = Resource.create({"process.pid": os.getpid()})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "vsched"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self.tracer = self._provider.get_tracer("vsched")
        self.ending: set[RequestTrace] = set()
        for name in _SDK_LOGGERS:
            logging.getLogger(name).addFilter(self._trouble)

    def begin_trace(
        self, path: str, headers: Iterable[tuple[bytes, bytes]], *, operation: str, model: str
    ) -> RequestTrace:
        """Start the span of a request, as a child of the span in its `traceparent`, if any."""
        carrier: dict[str, str] = {}
        for name, value in headers:
            if name in (b"traceparent", b"tracestate"):
                carrier.setdefault(name.decode(), value.decode("latin-1"))
        return RequestTrace(self, path, carrier, operation, model)

    async def close(self) -> None:
        """Send the remaining spans.

        Blocks: for at most `CLOSE_S`, after which they are lost.
        """
        for trace in list(self.ending):
            trace.add_phases()
        closing = threading.Thread(target=self._shut_down, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_S)
        if closing.is_alive():
            logger.warning("the last traces were not sent within %g s", CLOSE_S)
            self._exporter.shutdown()  # type: ignore[no-untyped-call] # ends its pause before a retry

    def _shut_down(self) -> None:
        self._provider.shutdown()
        for name in _SDK_LOGGERS:
            logging.getLogger(name).removeFilter(self._trouble)


class RequestTrace:
    """The trace of one request.

    Attributes:
        choices: Accepted choices.
        trace_id: Id of the trace, in hexadecimal.
        traceparent: Header of the response.
    """

    def __init__(
        self, tracing: Tracing, path: str, carrier: dict[str, str], operation: str, model: str
    ) -> None:
        self._tracing = tracing
        self._began_ns = time.monotonic_ns()
        self._epoch_ns = time.time_ns() - self._began_ns  # the kernel's clock begins then
        self._checked_ns = self._ended_ns = 0
        self._operation = operation
        self.choices = AcceptedChoices()
        self._span = tracing.tracer.start_span(
            f"{operation} {model}",
            context=TraceContextTextMapPropagator().extract(carrier) if carrier else None,
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "vsched",
                "gen_ai.request.model": model,
                "http.request.method": "POST",
                "url.path": path,
            },
            start_time=self._epoch_ns + self._began_ns,
        )
        context = self._span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}"
        self.traceparent = (
            f"00-{self.trace_id}-{context.span_id:016x}-{context.trace_flags:02x}".encode()
        )

    def describe(self, job: CheckedRequest, tenant: str) -> None:
        """Add the parameters of a checked request, without its contents; the arrival policy gets it now."""
        self._checked_ns = time.monotonic_ns()
        if not self._span.is_recording():
            return
        sampling = job.sampling
        self._span.update_name(f"{self._operation} {job.model}")
        values: dict[str, str | float | None] = {
            "gen_ai.request.model": job.model,
            "gen_ai.response.model": job.model,
            "gen_ai.response.id": job.request_id,
            "gen_ai.request.stream": job.stream,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.max_tokens": sampling.max_tokens or None,
            "gen_ai.request.top_k": sampling.top_k if sampling.top_k > 0 else None,
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.request.choice.count": job.n if job.n > 1 else None,
            "gen_ai.conversation.id": job.session or None,
            "vsched.tenant": tenant or None,
        }
        self._span.set_attributes({key: one for key, one in values.items() if one is not None})

    def end_trace(
        self, outcome: str, error: RequestRefused | RequestFailed | None, *, status: int
    ) -> None:
        """End the trace of a request that ended in this outcome, with this HTTP status, 0 for no response.

        Its phases are added as soon as all of its choices have ended, which a disconnect only initiates.
        """
        if not self._span.is_recording():
            return
        self._ended_ns = time.monotonic_ns()
        if status:
            self._span.set_attribute("http.response.status_code", status)
        if error is not None:
            self._span.set_attribute("error.type", error.code or "error")
            if error.status >= 429:  # a message about an invalid request may quote its contents
                self._span.set_attribute("error.message", error.message)
            if error.status >= 500:  # by the conventions, a refused request is the client's error
                self._span.set_status(StatusCode.ERROR, error.message)
        elif outcome in _UNFINISHED or outcome in _FAILED:
            self._span.set_attribute("error.type", outcome)
            self._span.set_status(StatusCode.ERROR, _UNFINISHED.get(outcome, outcome))
        self._tracing.ending.add(self)
        for one in self.choices.generations:
            one.subscribe(self._on_news)
        self._on_news()

    def _on_news(self) -> None:
        ended = all(one.reason is not None for one in self.choices.generations)
        if ended and self in self._tracing.ending:
            self.add_phases()

    def add_phases(self) -> None:
        """Add a span for each phase, and send the trace."""
        self._tracing.ending.discard(self)
        choices = self.choices.generations
        submitted_ns = max((one.times.submitted_ns for one in choices), default=0)
        checked_ns, end_ns = self._checked_ns, submitted_ns or self._ended_ns
        self._phase("validate", self._began_ns, checked_ns or end_ns, failed=not checked_ns)
        if checked_ns:
            self._phase("prepare", checked_ns, end_ns, failed=not submitted_ns)
        for index, one in enumerate(choices[:CHOICES_MAX]):
            self._add_choice(one, index if len(choices) > 1 else None)
        if choices:
            self._span.set_attributes(self._usage(choices))
        last_ns = max(self._ended_ns, *(one.times.finished_ns for one in choices), 0)
        self._span.end(self._epoch_ns + last_ns)

    def _usage(self, choices: Sequence[GenerationContract]) -> dict[str, int | list[str]]:
        usage = self.choices.usage
        return {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.prompt_tokens_details.cached_tokens,
            "gen_ai.response.finish_reasons": [
                one.reason.value for one in choices if one.reason is not None
            ],
            "vsched.encoded_items": sum(one.times.encoded_items for one in choices),
            "vsched.preemptions": sum(one.times.preemptions for one in choices),
        }

    def _add_choice(self, choice: GenerationContract, index: int | None) -> None:
        phases = list(phases_of(choice.times))
        for number, (name, start_ns, end_ns) in enumerate(phases, 1):
            failed = number == len(phases) and choice.reason in _FAILED
            self._phase(name, start_ns, end_ns, failed=failed, index=index)

    def _phase(
        self, name: str, start_ns: int, end_ns: int, *, failed: bool, index: int | None = None
    ) -> None:
        span = self._tracing.tracer.start_span(
            name,
            context=set_span_in_context(self._span),
            attributes=None if index is None else {"vsched.choice": index},
            start_time=self._epoch_ns + start_ns,
        )
        if failed:
            span.set_status(StatusCode.ERROR)
        span.end(self._epoch_ns + max(start_ns, end_ns))


def phases_of(times: RequestTimes) -> Iterator[tuple[str, int, int]]:
    """Yield name, start and end of each phase that a request reached; without images, it skips `encode`."""
    starts = {
        "encode": times.submitted_ns,
        "queue": times.items_ready_ns,
        "prefill": times.admitted_ns,
        "decode": times.first_token_ns,
    }
    reached = [(name, start_ns) for name, start_ns in starts.items() if start_ns]
    ends = [*(start_ns for _, start_ns in reached[1:]), times.finished_ns]
    for (name, start_ns), end_ns in zip(reached, ends, strict=False):
        if name != "encode" or end_ns > start_ns:
            yield name, start_ns, end_ns
