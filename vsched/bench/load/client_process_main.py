"""Clients in a separate process: `python -m vsched.bench.load.client_process_main ORDER`.

Prints `ready` after warm-up, waits for a line, then runs the load and writes its figures.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import uvloop

from vsched.bench.load.client import BenchClient, chat_body
from vsched.bench.load.generator import LoadPlan, draw
from vsched.bench.load.generator import run as run_load
from vsched.bench.load.measure import fixed_length_fields
from vsched.bench.load.shapes import Case, shape_of


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


async def run(order: LoadOrder) -> None:
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
    uvloop.run(run(msgspec.json.decode(sys.argv[1], type=LoadOrder)))
