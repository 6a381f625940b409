"""The clients of a profile, in a process of their own: `python -m vsched.bench.profile.load_process ORDER`.

Says `ready` when everything is warm, waits for a line, and then runs the load and writes its figures.
"""

from __future__ import annotations

import sys

import msgspec
import uvloop

from vsched.bench.load.client import BenchClient
from vsched.bench.load.closed_loop import Load, run_load
from vsched.bench.load.shapes import Case, shape_of


class LoadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The load, and where to."""

    case: Case
    clients: int
    requests: int
    url: str = ""
    model: str = ""
    output_tokens: int | None = None
    image_pixels: int = 448
    seed: int = 0

    def load(self) -> Load:
        """Return it as the load generator takes it."""
        shape = shape_of(
            self.case,
            words=None,
            output_tokens=self.output_tokens,
            image_pixels=self.image_pixels,
            turns=1,
        )
        return Load(
            case=self.case,
            shape=shape,
            concurrency=self.clients,
            sessions=self.requests,
            model=self.model,
            seed=self.seed,
            warmup=0,
        )


async def run(order: LoadOrder) -> None:
    """Warm up, wait, and run."""
    client = BenchClient(order.url)
    warm = msgspec.structs.replace(
        order, requests=order.clients, output_tokens=8, seed=order.seed + 1
    )
    await run_load(client, warm.load(), lambda: None)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    figures = await run_load(client, order.load(), lambda: None)
    sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")


if __name__ == "__main__":
    uvloop.run(run(msgspec.json.decode(sys.argv[1], type=LoadOrder)))
