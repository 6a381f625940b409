"""`python -m tests.bench.kv CHECKPOINT`: number of concurrent requests in the same memory, by KV cache type.

A text-only engine with a KV cache of a given size in bytes serves requests of one length, all at
once, with the cache in the model's type and in 8 bits. The table shows its tokens, the maximum
number of requests decoding in a step, the number of preemptions, and the total time. Prompts share
no prefix, so there are no prefix cache hits.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from typing import Any, NamedTuple

from vsched import Config, Engine, SamplingParams
from vsched.config import load_config

LOOK_S = 0.01


class Row(NamedTuple):
    """Results for one type of the KV cache."""

    kv_dtype: str
    bytes_per_token: int
    tokens: int
    at_once: int
    preemptions: int
    took_s: float


async def measure(config: Config, *, requests: int, prompt: int, output: int) -> Row:
    """Serve all requests, and sample the number of running ones."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output)
    chance, numbers = random.Random(0), itertools.count()
    async with Engine(config) as engine:
        info = engine.info
        prompts = [
            [chance.randrange(info.vocab_size) for _ in range(prompt)] for _ in range(requests)
        ]
        most = 0

        async def ask(tokens: list[int]) -> None:
            generation = await engine.generate(
                prompt=tokens, sampling=sampling, request_id=f"ask-{next(numbers)}"
            )
            async for _ in generation:
                pass

        async def look() -> None:
            nonlocal most
            while True:
                counts: dict[str, Any] = engine.statistics()["generate"]
                most = max(most, counts["decoding"])
                await asyncio.sleep(LOOK_S)

        await ask(prompts[0][: prompt // 2])
        before = engine.statistics()["generate"]["preemptions"]
        looking = asyncio.create_task(look())
        start_s = time.perf_counter()
        await asyncio.gather(*map(ask, prompts))
        took_s = time.perf_counter() - start_s
        looking.cancel()
        counts = engine.statistics()["generate"]
        return Row(
            config.generate.kv_dtype,
            info.kv_bytes_per_token,
            counts["blocks_total"] * config.generate.block_size,
            most,
            counts["preemptions"] - before,
            took_s,
        )


def main(words: list[str] | None = None) -> list[Row]:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.kv", description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--mib", type=int, default=16, help="of the KV cache")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(words)
    print(
        "| KV cache | bytes a token | tokens | requests at once | preemptions | requests a second |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    rows = []
    for kv_dtype in ("auto", "int8"):
        sets = (
            f"model.path={options.checkpoint}",
            "encode.replicas=0",
            f"generate.kv_dtype={kv_dtype}",
            f'generate.memory={{use="pinned", bytes={options.mib << 20}}}',
            *options.set,
        )
        config = load_config(None, sets=sets, environ={}).config
        load = {name: getattr(options, name) for name in ("requests", "prompt", "output")}
        row = asyncio.run(measure(config, **load))
        rows.append(row)
        print(
            f"| {row.kv_dtype} | {row.bytes_per_token:,} | {row.tokens:,} | {row.at_once} | {row.preemptions} | "
            f"{options.requests / row.took_s:.2f} |",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    main()
