from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.unit.sim.virtual import current
from vsched.sim.network.asgi_client import AsgiClient, Disconnected


class Service:
    """Counts to ten, a number every 1.5 s, and records clients that leave early."""

    def __init__(self) -> None:
        self.left: list[tuple[str, float]] = []
        self.sent = 0
        routes = [Route("/count", self.count), Route("/echo", self.echo, methods=["POST"])]
        self.client = AsgiClient(Starlette(routes=routes))

    async def count(self, _request: Request) -> Response:
        async def numbers() -> AsyncIterator[bytes]:
            try:
                for number in range(10):
                    await asyncio.sleep(1.5)
                    self.sent += 1
                    yield b'data: {"n": %d}\n\n' % number
                yield b"data: [DO"
                yield b"NE]\n\n"
            except asyncio.CancelledError:
                self.left.append(("count", current().time()))
                raise

        return StreamingResponse(numbers(), media_type="text/event-stream")

    async def echo(self, request: Request) -> Response:
        return JSONResponse({"body": (await request.body()).decode()})


@pytest.mark.sim
async def test_client_reads_events_when_they_come() -> None:
    async with Service().client.open("GET", "/count") as call:
        assert await call.started() == 200
        events = [(current().time(), data) async for data in call.events()]
    numbers = [(1.5 * (n + 1), f'{{"n": {n}}}') for n in range(10)]
    assert events == [*numbers, (15.0, "[DONE]")]
    assert call.over


@pytest.mark.sim
@pytest.mark.parametrize("at_s", [0, 4.5, 7.7])
async def test_client_leaves_at_any_moment(at_s: float) -> None:
    service = Service()
    async with service.client.open("GET", "/count") as call:
        current().call_later(at_s, call.disconnect)
        with pytest.raises(Disconnected):
            await call.response()
    assert current().time() == at_s
    assert service.sent == sum(1.5 * n <= at_s for n in range(1, 11))
    assert service.left == [("count", at_s)]


@pytest.mark.sim
async def test_client_sends_a_body_in_pieces_and_can_leave_between_them() -> None:
    async def pieces(pause_s: float) -> AsyncIterator[bytes]:
        for piece in (b"ab", b"cd", b"ef"):
            yield piece
            await asyncio.sleep(pause_s)

    service = Service()
    async with service.client.open("POST", "/echo", pieces=pieces(1)) as call:
        assert (await call.response()).json()["body"] == "abcdef"
    assert current().time() == 3
    seen: list[Any] = []

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        while not seen or seen[-1]["type"] != "http.disconnect":
            seen.append(await receive())

    async with AsgiClient(app).open("POST", "/", pieces=pieces(10)) as call:
        current().call_later(15, call.disconnect)
        with pytest.raises(Disconnected):
            await call.response()
    assert [message.get("body") for message in seen] == [b"ab", b"cd", None]
    assert current().time() == 18


@pytest.mark.sim
async def test_client_hears_of_an_application_that_raises_or_ends_without_a_word() -> None:
    async def app(_scope: Any, _receive: Any, _send: Any) -> None:
        await asyncio.sleep(1)

    async def mistaken(_scope: Any, _receive: Any, _send: Any) -> None:
        raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        await AsgiClient(mistaken).request("GET", "/")
    with pytest.raises(Disconnected, match="the application ended"):
        await AsgiClient(app).request("GET", "/")


@pytest.mark.sim
async def test_application_gets_the_end_of_a_complete_response() -> None:
    """By the same message as for a disconnect; later messages of the application are dropped."""
    received: list[Any] = []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        received.append(await receive())
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})
        received.append(await receive())

    assert (await AsgiClient(app).request("GET", "/")).status == 204
    assert [message["type"] for message in received] == ["http.request", "http.disconnect"]
