"""Clients in a process of their own, so that they take no time from a server in this one.

`python -m vsched.bench.load.client_processes ORDER` prints `ready` after warm-up, waits for a line,
then runs the load and writes its figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import uvloop

from vsched.bench.load.client import BenchClient, BenchError, chat_body
from vsched.bench.load.generator import Figures, LoadPlan, draw, fixed_length_fields, run_load
from vsched.bench.load.shapes import Case, shape_of

CLIENTS_S = 1800.0
"""Timeout of warm-up, and of a run."""


class LoadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The load and its target; `warmup` requests of a few tokens come first, by default one per client."""

    case: Case
    clients: int
    requests: int
    url: str = ""
    model: str = ""
    output_tokens: int | None = None
    image_pixels: int = 448
    seed: int = 0
    warmup: int | None = None

    def plan(self) -> LoadPlan:
        """Return the plan for the load generator."""
        shape = shape_of(
            self.case,
            words=None,
            output_tokens=self.output_tokens,
            image_pixels=self.image_pixels,
            turns=1,
        )
        return LoadPlan(
            case=self.case,
            shape=shape,
            concurrency=self.clients,
            sessions=self.requests,
            seed=str(self.seed),
            warmup=0,
        )

    def body(self, messages: list[dict[str, Any]], tokens: int) -> bytes:
        """Return the body of a request for exactly `tokens`."""
        return chat_body(self.model, messages, tokens, fixed_length_fields(tokens))


@contextlib.asynccontextmanager
async def ready_clients(order: LoadOrder) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start clients and warm up; yields their process, which waits for `run_clients`.

    Raises:
        BenchError: When warm-up failed.
    """
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "vsched.bench.load.client_processes",
            msgspec.json.encode(order),
        ),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        if await _line_of(process) != b"ready\n":
            raise BenchError("the clients could not warm up. Remedy: see their output above.")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def run_clients(process: asyncio.subprocess.Process) -> Figures:
    """Start the load, and return the clients' figures.

    Raises:
        BenchError: When a request failed.
    """
    assert process.stdin is not None
    process.stdin.write(b"go\n")
    answer = await _line_of(process)
    if not answer:
        raise BenchError("the clients ended early. Remedy: see their output above.")
    figures = msgspec.json.decode(answer, type=Figures)
    if figures.failed:
        raise BenchError(f"{figures.failed} requests failed, most often: {figures.errors[0]}")
    return figures


async def _line_of(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(CLIENTS_S):
            return await process.stdout.readline()
    except TimeoutError:
        raise BenchError(f"the clients were not through after {CLIENTS_S:g} s") from None


async def _serve_order(order: LoadOrder) -> None:
    """Warm up, wait, and run."""
    client = BenchClient(order.url)
    warm = msgspec.structs.replace(
        order,
        requests=order.clients if order.warmup is None else order.warmup,
        output_tokens=8,
        seed=order.seed + 1,
    )
    await run_load(client, draw(warm.plan()), warm.body, finished=lambda: None)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    figures = await run_load(client, draw(order.plan()), order.body, finished=lambda: None)
    sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")


if __name__ == "__main__":
    uvloop.run(_serve_order(msgspec.json.decode(sys.argv[1], type=LoadOrder)))
