"""Start-up time and memory of servers: `python -m tests.bench.servers.start CHECKPOINT...`.

Each checkpoint is served with its defaults, in turns. It gets three text requests, then one with a
picture if supported. CPU seconds are those of all processes until the server is ready, so that
figures are meaningful under other load; memory is that of each process after the responses, with
shared pages divided (PSS). A first start compiles kernels: use `--repeats 2` or more, and look at
the later ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.options import assignment
from tests.bench.servers import processes
from tests.bench.servers.server import Server, serving
from tests.bench.servers.sides import spec_of
from vsched.bench.load.client import BenchClient, chat_body
from vsched.bench.load.generator import draw_image


def measure(checkpoint: Path, assignments: Sequence[str], ready_s: float) -> dict[str, Any]:
    """Start a server, send requests, end it; return the measurements."""
    with tempfile.TemporaryDirectory() as folder:
        with serving(spec_of(checkpoint, assignments), Path(folder) / "server.log") as server:
            seconds = server.wait_ready(ready_s)
            spent = processes.cpu_s(server.pids())
            texts = [_answer_ms(server, "Hello") for _ in range(3)]
            question = {"type": "text", "text": "What is this?"}
            new = [{"type": "image_url", "image_url": {"url": draw_image(n, 448)}} for n in (0, 1)]
            pictures = [_answer_ms(server, [picture, question]) for picture in new]
            held = processes.memory_mib(server.pids())
        return {
            "checkpoint": checkpoint.name,
            "ready_s": round(seconds, 1),
            "processor_s": round(spent, 1),
            "text_ms": texts,
            "picture_ms": pictures,
            "memory_mib": round(sum(held.values()), 1),
            "of": held,
        }


def _answer_ms(server: Server, content: object) -> float | str:
    """Return the duration of a request for 8 tokens, or the reason of its refusal."""
    body = chat_body(server.spec.model, [{"role": "user", "content": content}], 8, {})
    sample = asyncio.run(BenchClient(server.spec.url).chat(body))
    return sample.error or round((sample.ended - sample.started) * 1000, 1)


def main() -> None:
    """Measure in turns, and print each start as a line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.servers.start", description=__doc__
    )
    parser.add_argument("checkpoints", type=Path, nargs="+")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", type=assignment, action="append", default=[])
    parser.add_argument("--ready-s", type=float, default=600.0)
    options = parser.parse_args()
    for _ in range(options.repeats):
        for checkpoint in options.checkpoints:
            found = measure(checkpoint.resolve(), options.set, options.ready_s)
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
