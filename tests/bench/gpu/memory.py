"""The KV cache size found by `auto-profile` on a GPU, compared with the largest that passes the same profiling run.

`python -m tests.bench.gpu.memory CHECKPOINT --out FOLDER` adds to `server.json` after each start of
a server.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from tests.bench.gpu.page import KvTry, add_results
from tests.bench.gpu.serve import settings_of
from vsched.config import load_config
from vsched.engine import Engine
from vsched.errors import VschedError

FINER = 0.01
"""The bisection ends at this relative accuracy."""


async def start(settings: list[str], memory: str) -> KvTry:
    """Start an engine with a memory policy; return the size of its KV cache, or the reason there is none."""
    began_s = time.monotonic()
    try:
        config = load_config(None, sets=[*settings, f"generate.memory={memory}"], environ={}).config
        async with Engine(config) as engine:
            blocks = engine.statistics()["generate"]["blocks_total"]
            tokens = blocks * engine.config.generate.block_size
        reason = ""
    except VschedError as error:
        tokens, reason = 0, str(error)
    return KvTry(
        memory=memory, tokens=tokens, seconds=round(time.monotonic() - began_s, 1), reason=reason
    )


def pinned(tokens: int) -> str:
    """Return the policy with a fixed number of tokens, the same profiling run, and no reserve."""
    return f'{{use="pinned", tokens={tokens}, mem_fraction=1.0, headroom_bytes=0}}'


async def measure(
    settings: list[str], write: Callable[[list[KvTry]], None], *, seconds: float
) -> None:
    """Find the automatic size, then the largest one by bisection from there, as far as time permits."""
    ends_s = time.monotonic() + seconds
    tries: list[KvTry] = []

    async def attempt(memory: str) -> int:
        tries.append(await start(settings, memory))
        print(tries[-1], flush=True)
        write(tries)
        return tries[-1].tokens

    found = await attempt('{use="auto-profile"}')
    if not found:
        return
    low, high = found, int(found * 1.16)
    while high - low > FINER * low and time.monotonic() + 1.3 * tries[-1].seconds < ends_s:
        middle = (low + high) // 2
        if await attempt(pinned(middle)):
            low = middle
        else:
            high = middle


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu.memory", description=__doc__)
    parser.add_argument("path", help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=140)
    options = parser.parse_args()
    settings = [f"model.path={options.path}", *settings_of(options.device)]

    def write(tries: list[KvTry]) -> None:
        add_results(options.out, kv=tries)

    asyncio.run(measure(settings, write, seconds=options.seconds))


if __name__ == "__main__":
    main()
