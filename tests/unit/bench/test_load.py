from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest

from tests.each_case import each_case
from vsched.bench.load.client import BenchClient, BenchError, Sample, chat_body
from vsched.bench.load.generator import (
    NOT_ASKED,
    VIDEO_RATE,
    VIDEO_S,
    Answers,
    Figures,
    LoadPlan,
    draw,
    draw_session,
    fixed_length_fields,
    run_load,
    sessions_for,
    summarise,
    table,
    times,
)
from vsched.bench.load.shapes import Case, Shape, shape_of
from vsched.config import MediaConfig
from vsched.errors import ConfigError
from vsched.media.formats import VIDEO
from vsched.media.sources import read_local
from vsched.media.video import VideoLimits, inspect_video
from vsched.worker.contract import VideoFacts

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"


def event(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def piece(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
ANSWER = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
ANSWER += piece("ab") + piece("c") + USAGE + b"data: [DONE]\n\n"


class Server:
    """Replies with canned bytes, the last ones repeatedly; keeps the bodies, counts requests in flight."""

    def __init__(self, answers: Sequence[bytes]) -> None:
        self.answers = list(answers)
        self.url = ""
        self.bodies: list[Any] = []
        self.in_flight = 0
        self.in_flight_max = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight, self.in_flight_max)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
        body = await reader.readexactly(int(fields["Content-Length"]))
        if head.startswith("POST /v1/chat/completions "):
            self.bodies.append(msgspec.json.decode(body))
            writer.write(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])
        else:
            content = msgspec.json.encode({"data": [{"id": "demo"}]})
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
        await asyncio.sleep(0)
        writer.close()
        self.in_flight -= 1


@contextlib.asynccontextmanager
async def serving(*answers: bytes) -> AsyncIterator[Server]:
    server = Server(answers)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0, limit=2**20)
    async with listener:
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        yield server


def whole(body: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    coded = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in pieces)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + coded + b"0\r\n\r\n"


SILENT = event({"choices": [{"delta": {"content": ""}, "token_ids": [7]}]})


@each_case(
    ("answer", "stamps"),
    [
        (whole(ANSWER), 2),
        (chunked(ANSWER, 7), 2),
        (chunked(ANSWER, 1000), 2),
        # With `return_token_ids`: some tokens have no text, or a part of a character.
        (whole(piece("a") + SILENT + SILENT + piece("bc") + USAGE + b"data: [DONE]\n\n"), 4),
    ],
)
async def test_client_reads_a_stream_however_it_is_cut(answer: bytes, stamps: int) -> None:
    async with serving(answer) as server:
        sample = await BenchClient(server.url).chat(b"{}")
    assert sample.error is None
    assert sample.text == "abc"
    assert (len(sample.stamps), sample.prompt_tokens, sample.output_tokens) == (stamps, 5, 3)
    assert sample.started < sample.stamps[0] <= sample.stamps[-1] <= sample.ended


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"HTTP/1.1 429 X\r\nContent-Length: 4\r\n\r\nfull", "status 429: full"),
        (whole(piece("a") + event({"error": {"message": "broken"}})), "broken"),
        (whole(ANSWER)[:-20], "closed the connection"),
        (b"", "closed the connection"),
        (whole(b"data: {nonsense\n\n"), "DecodeError"),
        (b"nonsense\r\n\r\n", "HttpParser"),
    ],
)
async def test_client_reports_failures_in_the_sample(answer: bytes, text: str) -> None:
    async with serving(answer) as server:
        sample = await BenchClient(server.url).chat(b"{}")
    assert sample.error is not None
    assert text in sample.error


async def test_client_waits_for_a_server_that_is_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vsched.bench.load.client._READY_POLL_S", 0.0)
    async with serving(b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n", whole(ANSWER)) as server:
        sample = await BenchClient(server.url).chat_when_ready(b"{}")
    assert (sample.text, len(server.bodies)) == ("abc", 2)


async def test_client_requests_the_model() -> None:
    """An error names the option, if nobody listens or the server speaks no HTTP."""
    async with serving(b"") as server:
        assert await BenchClient(server.url + "/v1").model() == "demo"

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as listener:
        other = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        for url in (server.url, other):
            with pytest.raises(BenchError, match="check --url"):
                await BenchClient(url).model()


@each_case("url", ["", "localhost:8000", "ftp://x", "http://", "http://x:99999"])
def test_client_refuses_other_urls(url: str) -> None:
    with pytest.raises(ConfigError, match="http://host:port"):
        BenchClient(url)


def plan_of(case: Case, **fields: Any) -> LoadPlan:
    turns = 3 if case is Case.CONVERSATION else 1
    shape = Shape(words=3, output_tokens=3, image_pixels=16, turns=turns)
    return LoadPlan(case=case, shape=shape, **{"concurrency": 2, "sessions": 5, **fields})


def fixed_length(messages: list[dict[str, Any]], tokens: int) -> bytes:
    return chat_body("demo", messages, tokens, fixed_length_fields(tokens))


async def run_on(server: Server, plan: LoadPlan) -> tuple[Figures, int]:
    finished: list[None] = []
    client = BenchClient(server.url)
    done = run_load(client, draw(plan), fixed_length, finished=lambda: finished.append(None))
    return await done, len(finished)


@each_case(("case", "is_sampled"), [(Case.TEXT, False), (Case.SAMPLED, True)])
async def test_run_keeps_the_concurrency_and_sends_every_session(
    case: Case, *, is_sampled: bool
) -> None:
    """Requests of a sampled load set only a length, like those of clients that set no parameters."""
    async with serving(whole(ANSWER)) as server:
        figures, finished = await run_on(server, plan_of(case, warmup=1))
    assert (figures.requests, figures.failed, finished) == (5, 0, 5)
    assert server.in_flight_max == 2
    assert len({str(body["messages"]) for body in server.bodies}) == len(server.bodies) == 6
    assert {"temperature" in body for body in server.bodies} == {not is_sampled}
    assert server.bodies[0]["min_tokens"] == 3
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


async def test_conversation_grows_by_an_image_a_turn() -> None:
    async with serving(whole(ANSWER)) as server:
        plan = plan_of(Case.CONVERSATION, concurrency=1, sessions=1, warmup=0)
        figures, _ = await run_on(server, plan)
    roles = [[message["role"] for message in body["messages"]] for body in server.bodies]
    assert roles[2] == ["user", "assistant", "user", "assistant", "user"]
    assert server.bodies[2]["messages"][:3] == server.bodies[1]["messages"]
    assert server.bodies[1]["messages"][1]["content"] != "abc", "drawn, whatever the response"
    assert len(figures.turns) == 3


async def test_conversation_ends_with_its_first_failure() -> None:
    async with serving(b"") as server:
        figures, _ = await run_on(server, plan_of(Case.CONVERSATION, warmup=0))
    assert (figures.requests, figures.failed, figures.requests_s) == (15, 15, 0.0)
    assert figures.errors[0] == f"10 x {NOT_ASKED}", "two turns of each of five were not sent"
    assert figures.ttft_ms is None


def test_summary_computes_each_figure() -> None:
    samples = [
        Sample(10.0, 10.5, [10.1, 10.2, 10.4], ["a", "b", "c"], prompt_tokens=7, output_tokens=4),
        Sample(10.0, 11.0, [10.3], ["a"], prompt_tokens=9, output_tokens=1),
        Sample(10.0, 10.1, error="status 500"),
    ]
    sessions = [[sample] for sample in samples]
    answers = Answers(sessions=sessions, tokens=[4, 1, 4], wall_s=2.0, cpu_s=0.5)
    figures = summarise("text", 2, answers)
    assert (figures.requests, figures.failed, figures.errors) == (3, 1, ["1 x status 500"])
    assert (figures.requests_s, figures.output_tokens_s, figures.prompt_tokens_s) == (1.0, 2.5, 8.0)
    assert figures.client_cpu == 0.25
    assert figures.itl_ms is not None
    assert figures.itl_ms.mean == pytest.approx(150)
    for spread, p50 in ((figures.ttft_ms, 200), (figures.tpot_ms, 100), (figures.request_ms, 750)):
        assert spread is not None
        assert spread.p50 == pytest.approx(p50)
    assert figures.turns == []
    assert table([figures], "x").row_count == 1
    assert times([]) is None


def test_cases_are_drawn_from_the_seed() -> None:
    shape = shape_of(Case.IMAGE, words=None, output_tokens=None, image_pixels=32, turns=8)
    assert (shape.words, shape.output_tokens, shape.turns) == (100, 64, 1)
    assert draw_session(Case.IMAGE, shape, 1) == draw_session(Case.IMAGE, shape, 1)
    assert draw_session(Case.IMAGE, shape, 1) != draw_session(Case.IMAGE, shape, 2)
    first, second = (draw_session(Case.SAME_IMAGE, shape, seed)[0]["content"] for seed in (1, 2))
    assert first[0] == second[0]
    assert first[1] != second[1]
    conversation = shape_of(Case.CONVERSATION, words=2, output_tokens=3, image_pixels=32, turns=8)
    turns = draw_session(Case.CONVERSATION, conversation, 1)
    assert len({str(turn["content"][0]) for turn in turns}) == 8


def test_sessions_follow_the_concurrency() -> None:
    """Rates of 256 clients of which only six have work are refused."""
    assert [sessions_for(Case.TEXT, level, None) for level in (1, 8, 32)] == [8, 16, 64]
    assert sessions_for(Case.CONVERSATION, 3, None) == 3
    assert sessions_for(Case.TEXT, 8, 8) == 8
    with pytest.raises(ConfigError, match="value 6 sessions, limit at least 256. Remedy: ask"):
        sessions_for(Case.TEXT, 256, 6)


def test_a_video_is_drawn_as_a_file() -> None:
    pytest.importorskip("av")
    shape = Shape(words=3, output_tokens=3, image_pixels=96)
    (message,) = draw_session(Case.VIDEO, shape, 3)
    part, text = message["content"]
    assert text["text"].count(" ") == 2
    url = part["video_url"]["url"]
    file = read_local(url, MediaConfig(), lambda _: None, VIDEO)
    facts = inspect_video(file, VideoLimits(pixels=10_000, seconds=9.0, decode_s=5.0))
    assert facts == VideoFacts(48, 48, VIDEO_S * VIDEO_RATE, VIDEO_RATE)
    assert draw_session(Case.VIDEO, shape, 4) != [message]
