"""Sends the drawn requests: to a complete simulated engine, and byte by byte over sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, defaultdict

import msgspec

from tests.fuzz.grammar import IMAGE, FuzzRequest, break_bytes, draw_request
from tests.patience import patience
from tests.unit.api.fakes import FakeEngine, served
from vsched.sim.cluster import SimEngine
from vsched.sim.loop import VirtualLoop
from vsched.sim.workload.images import appearance_of

HANG_S = 600.0
"""In virtual time, which only a hang uses up."""
TOGETHER = 8
DELIBERATE = 503


def fuzz_engine(seed: int, count: int) -> Counter[int]:
    """Send requests to a production engine whose ranks are simulated, on a virtual clock; count the statuses.

    Raises:
        AssertionError: With the request, if one hangs or gets an unintended 5xx.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_fuzz_engine(random.Random(seed), count))


async def _fuzz_engine(rng: random.Random, count: int) -> Counter[int]:
    statuses: Counter[int] = Counter()
    requests = iter([draw_request(rng) for _ in range(count)])

    async def client(engine: SimEngine) -> None:
        for request in requests:
            async with asyncio.timeout(HANG_S):
                response = await engine.client.request(
                    request.method, request.path, body=request.body, headers=request.headers
                )
            _check(response.status, response.body, request)
            statuses[response.status] += 1

    async with SimEngine() as engine, asyncio.TaskGroup() as clients:
        engine.world.appearances = defaultdict(lambda: appearance_of(IMAGE))  # whatever the salt
        for _ in range(TOGETHER):
            clients.create_task(client(engine))
    return statuses


def fuzz_sockets(seed: int, count: int) -> Counter[int]:
    """Send requests with broken heads and bodies over sockets; count the statuses, 0 for no response."""
    return asyncio.run(_fuzz_sockets(random.Random(seed), count))


async def _fuzz_sockets(rng: random.Random, count: int) -> Counter[int]:
    statuses: Counter[int] = Counter()
    raw = iter([_as_bytes(draw_request(rng), rng) for _ in range(count)])

    async def client(port: int) -> None:
        for sent in raw:
            async with patience():
                answer = await _exchange(port, sent)
            status = int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0
            _check(status, answer, sent)
            statuses[status] += 1

    async with served(FakeEngine(), receive_s=0.1) as port, asyncio.TaskGroup() as clients:
        for _ in range(TOGETHER):
            clients.create_task(client(port))
    return statuses


def _as_bytes(request: FuzzRequest, rng: random.Random) -> bytes:
    lines = [f"{request.method} {request.path} HTTP/1.1", "Host: localhost", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in request.headers]
    lines.append(f"Content-Length: {len(request.body)}")
    head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
    if rng.random() < 0.5:
        head = break_bytes(head, rng)
    return head + request.body


async def _exchange(port: int, sent: bytes) -> bytes:
    """Return the head of the response, and the part of its body that comes with it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        await writer.drain()
        return await reader.read(1 << 16)
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def _check(status: int, body: bytes, request: object) -> None:
    internal = status == DELIBERATE and b"internal_error" in body
    reported = f"{request!r} was answered by {status}: {body[:500]!r}"
    assert status < 500 or (status == DELIBERATE and not internal), reported
    if 400 <= status < 500 and isinstance(request, FuzzRequest) and request.method != "HEAD":
        with contextlib.suppress(KeyError):
            assert "Remedy" in msgspec.json.decode(body)["error"]["message"], reported
