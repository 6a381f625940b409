"""The load of the bench harness on a server with canned responses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tests.bench.servers.server import Spec
from vsched.bench.load.client import BenchClient
from vsched.bench.load.figures import NOT_ASKED, Figures
from vsched.bench.load.generator import RUNNING_PIECES, WARMUP, LoadPlan, draw
from vsched.bench.load.generator import run as load
from vsched.bench.load.measure import fixed_length_fields
from vsched.bench.load.shapes import Case, Shape

HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(content: Any) -> bytes:
    body = b"data: " + msgspec.json.encode(content) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(body), body)


class Server:
    """Streams the requested number of pieces; a decoder continues only once an image has been answered.

    Attributes:
        asked: The messages of all requests, in their order.
        running: Number of decoders with enough output to count as running, at each arrival of an image.
        broken: Texts in a request that make it fail.
    """

    def __init__(self) -> None:
        self.port = 0
        self.requested: list[list[Any]] = []
        self.running: list[int] = []
        self.broken: set[str] = set()
        self.waits = False
        self._decoding = 0
        self._image_answered = asyncio.Event()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
        body = msgspec.json.decode(await reader.readexactly(int(fields["Content-Length"])))
        self.requested.append(body["messages"])
        if any(text in str(body["messages"]) for text in self.broken):
            writer.write(b"HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n")
        else:
            await self._answer(writer, body)
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, body: Any) -> None:
        decoder = isinstance(body["messages"][-1]["content"], str)
        if not decoder and len(self.requested) > WARMUP:
            self.running.append(self._decoding)
        writer.write(HEAD)
        for index in range(body["max_tokens"]):
            if decoder and self.waits and index == RUNNING_PIECES:
                self._decoding += 1
                await writer.drain()
                await self._image_answered.wait()
            writer.write(chunk({"choices": [{"delta": {"content": "a"}}]}))
        usage = {"prompt_tokens": 5, "completion_tokens": body["max_tokens"]}
        writer.write(chunk({"choices": [], "usage": usage}) + b"0\r\n\r\n")
        await writer.drain()
        if not decoder and len(self.requested) > WARMUP:
            self._image_answered.set()


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    server = Server()
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    async with listener:
        server.port = listener.sockets[0].getsockname()[1]
        yield server


async def run(server: Server, plan: LoadPlan) -> tuple[Figures, int]:
    finished: list[None] = []
    spec = Spec(
        side="x", command=[], model="m", port=server.port, version="v", exactly=fixed_length_fields
    )
    client = BenchClient(spec.url, timeout_s=5)
    figures = await load(client, draw(plan), spec.body, finished=lambda: finished.append(None))
    return figures, len(finished)


def plan_of(case: str, *, turns: int = 1) -> LoadPlan:
    shape = Shape(words=4, output_tokens=3, image_pixels=16, turns=turns)
    return LoadPlan(
        case=Case(case), shape=shape, concurrency=2, sessions=3, seed="0", decoder_tokens=9
    )


@pytest.mark.parametrize(("case", "turns"), [("text", 1), ("image", 1), ("conversation", 3)])
async def test_loop_makes_every_request_of_every_session(case: str, turns: int) -> None:
    async with serving() as server:
        figures, finished = await run(server, plan_of(case, turns=turns))
    assert (figures.requests, figures.failed, figures.wrong_length) == (3 * turns, 0, 0)
    assert finished == 3 * turns
    assert len(server.requested) == 3 * turns + WARMUP
    assert figures.output_tokens_mean == figures.pieces_mean == 3


async def test_images_arrive_when_all_decoders_run() -> None:
    async with serving() as server:
        server.waits = True
        figures, finished = await run(server, plan_of("mixed"))
    assert server.running == [2, 2]
    assert (figures.requests, figures.failed, figures.wrong_length, finished) == (4, 0, 0, 4)
    assert figures.itl_ms is not None
    assert figures.output_tokens_mean == 6, "two of nine, two of three"


async def test_a_decoder_that_fails_keeps_nobody_waiting() -> None:
    plan = plan_of("mixed")
    async with serving() as server:
        server.broken = {str(draw(plan).sessions[0][0][0]["content"])}
        figures, _ = await run(server, plan)
    assert (figures.requests, figures.failed) == (4, 1)
    assert figures.errors == ["1 x status 500: "]


async def test_turns_behind_a_failure_count_as_failures() -> None:
    plan = plan_of("conversation", turns=3)
    async with serving() as server:
        second = draw(plan).sessions[0][1][-1]["content"][1]["text"]
        server.broken = {second}
        figures, finished = await run(server, plan)
    assert (figures.requests, figures.failed, finished) == (9, 2, 9)
    assert figures.errors == ["1 x status 500: ", f"1 x {NOT_ASKED}"]
