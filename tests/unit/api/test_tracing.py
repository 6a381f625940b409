"""OpenTelemetry traces: the spans that a collector receives, and no trouble without one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.each_case import each_case
from tests.patience import PATIENCE_S
from tests.unit.api.fakes import CHAT, Client, FakeEngine, Reply, chat
from vsched.aio.streams import OutputDelta
from vsched.api import ApiSettings, create_app
from vsched.api import tracing as tracing_module
from vsched.api.tracing import spans, traces_url
from vsched.api.tracing.spans import Tracing, phases_of
from vsched.config.sections import ServerConfig
from vsched.errors import ConfigError, RequestFailed, RequestRefused
from vsched.kernel.commands import RequestTimes
from vsched.logs import FIELDS, _formatter

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "shop=7"}


class Collector:
    """A collector on a port of this machine; `held` blocks its answers."""

    def __init__(self) -> None:
        self.received: list[ExportTraceServiceRequest] = []
        self.held = threading.Event()
        self.held.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                collector.received.append(ExportTraceServiceRequest.FromString(body))
                collector.held.wait()
                with contextlib.suppress(OSError):
                    self.send_response(200)
                    self.send_header("content-length", "0")
                    self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    @property
    def spans(self) -> list[Span]:
        """Received spans, the request's first and its phases in their order."""
        found = [
            span
            for request in self.received
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        return sorted(
            found, key=lambda span: (span.kind != Span.SPAN_KIND_SERVER, span.start_time_unix_nano)
        )


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector for whose answer the end of a server waits, however busy the machine is."""
    monkeypatch.setattr(spans, "CLOSE_S", PATIENCE_S)
    made = Collector()
    yield made
    made.held.set()
    made.server.shutdown()
    made.server.server_close()


@contextlib.asynccontextmanager
async def traced(url: str, engine: FakeEngine) -> AsyncIterator[Client]:
    tracing = Tracing(url)
    try:
        yield Client(create_app(engine, ApiSettings(access_log=True), tracing=tracing))
    finally:
        await tracing.close()


async def trace_of(
    collector: Collector, engine: FakeEngine, body: dict[str, Any] | None = None
) -> tuple[Reply, Span, list[Span]]:
    """Send a request; return the reply, the request's span and those of its phases."""
    collector.received.clear()
    async with traced(collector.url, engine) as client:
        reply = await client.send("POST", CHAT, body or chat(), headers=SAMPLED)
    root, *phases = collector.spans
    assert all(one.trace_id.hex() == TRACE for one in collector.spans)
    assert all(one.parent_span_id == root.span_id for one in phases)
    return reply, root, phases


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = (
            [each.string_value for each in value.values] if kind == "array_value" else value
        )
    return found


@each_case("stream", [False, True])
async def test_request_has_a_span_with_its_phases(
    collector: Collector, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    body = chat(max_tokens=9, temperature=0.5, seed=3, stream=stream)
    caplog.clear()
    with caplog.at_level(logging.INFO, "vsched.access"):
        reply, root, phases = await trace_of(collector, FakeEngine(), body)
    assert (root.name, root.kind) == ("chat demo", Span.SPAN_KIND_SERVER)
    assert (root.parent_span_id.hex(), root.trace_state) == (PARENT, "shop=7")
    assert reply.headers["traceparent"] == f"00-{TRACE}-{root.span_id.hex()}-01"
    names = ["validate", "prepare", "encode", "queue", "prefill", "decode"]
    assert [one.name for one in phases] == names
    for one, following in itertools.pairwise(phases):
        assert one.end_time_unix_nano == following.start_time_unix_nano
    assert phases[0].start_time_unix_nano == root.start_time_unix_nano
    assert phases[-1].end_time_unix_nano <= root.end_time_unix_nano
    assert root.status.code == UNSET
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "demo",
        "gen_ai.request.max_tokens": 9, "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3, "gen_ai.request.stream": stream,
        "gen_ai.response.finish_reasons": ["stop"], "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 5, "gen_ai.usage.cache_read.input_tokens": 4,
        "http.response.status_code": 200, "url.path": CHAT, "vsched.encoded_items": 1,
    }  # fmt: skip
    found = attributes(root)
    assert expected.items() <= found.items()
    assert found["gen_ai.response.id"] == reply.headers["x-request-id"]
    resource = collector.received[0].resource_spans[0].resource
    assert attributes(resource)["service.name"] == "vsched"
    (line,) = (one for one in caplog.records if one.name == "vsched.access")
    assert getattr(line, FIELDS)["trace_id"] == TRACE
    assert line.getMessage().endswith(TRACE)


async def test_request_without_parent_is_traced_and_unsampled_one_not(collector: Collector) -> None:
    parents = ("00-zero-1-01", f"00-{TRACE}-{PARENT}-00")
    sent = [{}, *({"traceparent": parent} for parent in parents)]
    async with traced(collector.url, FakeEngine()) as client:
        replies = [await client.send("POST", CHAT, chat(), headers=each) for each in sent]
    *begun, unsampled = [reply.headers["traceparent"].split("-") for reply in replies]
    roots = [one for one in collector.spans if one.name == "chat demo"]
    assert not any(one.parent_span_id for one in roots)
    assert sorted(trace for _, trace, *_ in begun) == sorted(one.trace_id.hex() for one in roots)
    assert len({trace for _, trace, *_ in begun}) == 2
    assert (unsampled[1], unsampled[3]) == (TRACE, "00")


async def test_choices_have_phases_of_their_own(collector: Collector) -> None:
    _, root, phases = await trace_of(collector, FakeEngine(), chat(n=2))
    decoded = [attributes(one)["vsched.choice"] for one in phases if one.name == "decode"]
    assert sorted(decoded) == [0, 1]
    assert attributes(root)["gen_ai.request.choice.count"] == 2
    assert attributes(root)["gen_ai.usage.output_tokens"] == 10


UNSET, ERROR = Status.STATUS_CODE_UNSET, Status.STATUS_CODE_ERROR


@each_case(
    ("phase", "error", "status", "kind", "code"),
    [
        ("decode", RequestFailed("the group was lost", code="lost"), 500, "lost", ERROR),
        *(
            ("prepare", RequestRefused("full.", code="queue_full", status=status), status,
             "queue_full", code)
            for status, code in ((429, UNSET), (503, ERROR))
        ),
        ("validate", None, 400, "invalid_value", UNSET),
    ],
)  # fmt: skip
async def test_request_that_fails_ends_in_a_phase_with_the_reason(
    collector: Collector, phase: str, error: Exception | None, status: int, kind: str, code: Any
) -> None:
    """Without the contents of an invalid one."""
    engine = FakeEngine(OutputDelta("a", [1]), *([error] if error else []))
    engine.refusal = error if phase == "prepare" else None
    invalid = {"temperature": "my secret"} if phase == "validate" else {}
    reply, root, phases = await trace_of(collector, engine, chat(**invalid))
    found = attributes(root)
    assert reply.headers["traceparent"].split("-")[1] == TRACE
    assert reply.status == found["http.response.status_code"] == status
    assert (found["error.type"], root.status.code) == (kind, code)
    assert error is None or str(error) in {root.status.message, found.get("error.message")}
    assert phases[-1].name == phase
    if phase == "decode":
        failed = [one.name for one in phases if one.status.code == ERROR]
        assert failed == ["decode"]
    assert "secret" not in str(root)


async def test_all_log_lines_of_a_request_have_its_ids(collector: Collector) -> None:
    lines: list[dict[str, Any]] = []
    engine = FakeEngine(ValueError("a bug"))
    handler = logging.Handler()
    handler.setFormatter(_formatter("engine", "json"))
    handler.emit = lambda record: lines.append(json.loads(handler.format(record)))  # type: ignore[method-assign]
    logging.getLogger("vsched").addHandler(handler)
    try:
        reply, *_ = await trace_of(collector, engine)
        logging.getLogger("vsched").warning("of no request")
    finally:
        logging.getLogger("vsched").removeHandler(handler)
    assert reply.status == 500
    (failed,) = [line for line in lines if "ValueError" in line.get("exception", "")]
    assert failed["trace_id"] == TRACE
    assert failed["request_id"].startswith("chatcmpl-")
    assert "request_id" not in lines[-1]


async def test_aborted_request_is_traced_once_its_choice_has_ended(collector: Collector) -> None:
    engine = FakeEngine(OutputDelta("a", [1]), asyncio.Event())
    async with traced(collector.url, engine) as client:
        sending = asyncio.create_task(client.send("POST", CHAT, chat(stream=True), headers=SAMPLED))
        await engine.entered.wait()  # set before the choice exists, which takes no further turn
        await engine.generations[0].waiting.wait()
        client.leave()
        await sending
    root, *phases = collector.spans
    assert root.status.message == "the client disconnected"
    assert attributes(root)["error.type"] == "disconnected"
    assert attributes(root)["gen_ai.response.finish_reasons"] == ["abort"]
    assert [one.name for one in phases] == ["validate", "prepare", "encode"]
    assert [one.status.code for one in phases] == [UNSET, UNSET, ERROR]


async def test_unreachable_collector_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with traced(f"http://127.0.0.1:{port}/v1/traces", FakeEngine()) as client:
        for _ in range(3):
            assert (await client.send("POST", CHAT, chat())).status == 200
        logging.getLogger("opentelemetry.sdk._shared_internal").warning("Queue full")
        logging.getLogger("opentelemetry.sdk._shared_internal").warning("Queue full again")
    warnings = [one for one in caplog.records if one.levelno >= logging.WARNING]
    lost = [one.getMessage() for one in warnings if "do not reach" in one.getMessage()]
    assert len(lost) == 1
    assert f"127.0.0.1:{port}" in lost[0]
    assert "Remedy:" in lost[0]
    assert all(one.name.startswith("vsched.api.tracing") for one in warnings)


async def test_stop_does_not_wait_for_a_silent_collector(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spans, "CLOSE_S", 0.05)
    collector.held.clear()
    async with traced(collector.url, FakeEngine()) as client:
        await client.send("POST", CHAT, chat())
    assert not collector.held.is_set()  # it still has not answered
    assert "the last traces were not sent within 0.05 s" in caplog.text


def test_text_request_has_no_encode_phase() -> None:
    times = RequestTimes(submitted_ns=5, items_ready_ns=5, admitted_ns=7, finished_ns=9)
    assert list(phases_of(times)) == [("queue", 5, 7), ("prefill", 7, 9)]
    assert not list(phases_of(RequestTimes()))


@each_case(
    ("setting", "variables", "url"),
    [
        ("", {}, ""),
        ("http://c:4318", {}, "http://c:4318/v1/traces"),
        ("http://c:4318/v1/traces/", {}, "http://c:4318/v1/traces"),
        ("http://c", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://d"}, "http://c/v1/traces"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://d/"}, "http://d/v1/traces"),
        ("", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://e/own"}, "http://e/own"),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://d", "OTEL_TRACES_EXPORTER": "none"}, ""),
        ("http://c", {"OTEL_SDK_DISABLED": "true"}, ""),
    ],
)
def test_traces_url(
    monkeypatch: pytest.MonkeyPatch, setting: str, variables: dict[str, str], url: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert traces_url(ServerConfig(otlp_endpoint=setting)) == url


def test_missing_sdk(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The setting needs it; a variable of the host does not keep the server from starting."""
    monkeypatch.setattr(tracing_module, "_EXPORTER", "opentelemetry_absent.exporter")
    with pytest.raises(ConfigError, match=r"server.otlp_endpoint: .* pip install 'vsched\[otel\]'"):
        traces_url(ServerConfig(otlp_endpoint="http://c"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://d")
    assert traces_url(ServerConfig()) == ""
    assert "pip install 'vsched[otel]'" in caplog.text


def test_variable_that_the_sdk_rejects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "0")
    with pytest.raises(ConfigError, match="Remedy: correct server.otlp_endpoint or the OTEL_"):
        tracing_module.open_tracing("http://c/v1/traces")


@pytest.mark.thorough
def test_server_without_traces_does_not_import_the_sdk() -> None:
    code = (
        "import sys; import vsched.api.server, vsched.api.processes.process_main; "
        "from vsched.api.tracing import *; from vsched.config.sections import ServerConfig; "
        "import vsched.api.tracing as t; assert t.open_tracing(t.traces_url(ServerConfig())) is None; "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
