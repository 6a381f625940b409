"""`vsched top` draws the states of a server, and says why it cannot."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import msgspec
import pytest
from rich.console import Console

from tests.commands import run_command
from tests.each_case import each_case
from vsched.aio.live import LivePolicy, LiveState
from vsched.cli.top_command import frame, read_states
from vsched.errors import VschedError
from vsched.kernel.live import MemoryMap, RequestRow

SECOND = 1_000_000_000
WAITING = RequestRow(
    request_id="r2",
    phase="ready",
    why="waiting for a slot: all 1 slots are taken; requests ahead of it: 1",
    since_ns=3 * SECOND,
    tenant="red",
)
RUNNING = RequestRow(request_id="r1", phase="decode", why="decoding: 7 tokens", slot=0)


def state(*, now_s: int = 5, decoded: int = 0, **changes: Any) -> LiveState:
    generate = {"slots_total": 1, "tokens_decoded": decoded, "tokens_prefilled": 0}
    fields: dict[str, Any] = {
        "requests": [RUNNING, WAITING],
        "requests_total": 9,
        "groups": [{"name": "generate", "state": "up", "running": 1, "waiting": 1, "restarts": 0}],
        "kv": {"generate": MemoryMap(20, 1, ("held", "cached"), (5, 3), [])},
        "counters": {"running": 1, "waiting": 8, "generate": generate},
        **changes,
    }
    return LiveState(now_ns=now_s * SECOND, state="ready", model="demo", uptime_s=1.0, **fields)


def drawn(found: LiveState, before: LiveState | None = None, rows: int = 10) -> list[str]:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(frame(found, before, rows))
    return console.export_text().splitlines()


def test_frame_has_waiting_requests_first_with_reason_and_time() -> None:
    lines = drawn(state())
    (waiting,) = [index for index, line in enumerate(lines) if line.startswith("r2")]
    (running,) = [index for index, line in enumerate(lines) if line.startswith("r1")]
    assert waiting < running
    assert "2.0 s" in lines[waiting]
    assert "all 1 slots are taken; requests ahead of it: 1" in lines[waiting]
    assert "5/20" in " ".join(lines)
    assert "and 7 more" in " ".join(lines)


def test_frame_has_rates_since_the_state_before_and_failing_policies() -> None:
    faulty = LivePolicy(table="generate.step", use="mine:Step", fields={}, faults=3)
    lines = drawn(state(now_s=7, decoded=100, policies=[faulty]), state(now_s=5, decoded=40))
    assert "output 30 tokens/s" in lines[0]
    assert any("generate.step: mine:Step: 3 faults" in line for line in lines)


@contextmanager
def answering(body: bytes, content_type: str, status: int = 200) -> Iterator[str]:
    """Serve one answer to every request; yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/admin/live"
            assert self.headers["authorization"] == "Bearer secret"
            self.send_response(status)
            self.send_header("content-type", content_type)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_states_are_read_from_the_stream_or_one_by_one() -> None:
    sent = [state(now_s=1), state(now_s=2)]
    body = b"".join(b"data: %b\n\n" % msgspec.json.encode(one) for one in sent)
    with answering(body + b"data: [DONE]\n\n", "text/event-stream; charset=utf-8") as url:
        assert list(read_states(url, "secret")) == sent
    with answering(msgspec.json.encode(sent[0]), "application/json") as url:
        assert list(read_states(url, "secret")) == sent[:1]


def test_command_prints_one_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VSCHED_ADMIN_KEY", "secret")
    with answering(msgspec.json.encode(state()), "application/json") as url:
        assert "demo: ready" in run_command("top", url, "--once")


@each_case(
    ("body", "content_type", "status", "words"),
    [
        (b'{"error": {"message": "the admin key is missing"}}', "application/json", 401,
         "status 401: the admin key is missing"),
        (b"<html>", "text/html", 200, "is no server of this version of vsched"),
        (b"", "text/event-stream", 200, "sent no state"),
    ],
)  # fmt: skip
def test_other_answers_are_errors(
    body: bytes, content_type: str, status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VSCHED_ADMIN_KEY", "secret")
    with answering(body, content_type, status) as url, pytest.raises(VschedError, match=words):
        run_command("top", url, "--once")


@each_case(
    ("options", "words"),
    [
        (["localhost", "--once"], "value 'localhost'"),
        (["http://localhost:99999", "--once"], "not a URL"),
        (["http://[::1", "--once"], "not a URL"),
        (["http://127.0.0.1:1", "--once"], "no connection to http://127.0.0.1:1"),
        (["http://127.0.0.1:1", "--once"], "Remedy: start the server"),
        (["http://127.0.0.1:1"], "is no terminal. Remedy: --once prints one state"),
    ],
)
def test_wrong_options_are_errors(options: list[str], words: str) -> None:
    with pytest.raises(VschedError, match=words):
        run_command("top", *options)
