"""`python -m tests.bench.grammars CHECKPOINT`: decode rate with a JSON schema, compared with unconstrained output.

One engine serves both in turns: rounds of requests that all run at once with the same number of
tokens. Figures are tokens per second from the first token of a round to its last, and ratios within
each round.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import msgspec

from tests.bench.options import options_of, settings_of
from tests.bench.report.pairs import pair_cells
from vsched import Config, Engine, SamplingParams
from vsched.aio.streams import Generation
from vsched.api.structured_outputs import constraint_from_schema
from vsched.config import load_config

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["car", "person", "dog"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["name", "kind", "count", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 200}
"""Longer than any output here, so that none ends early."""
PROMPT = "List what could be seen in a street, as JSON."
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "temperature 1": SamplingParams(temperature=1.0, seed=1, ignore_eos=True),
    "temperature 1, top-p 0.95": SamplingParams(
        temperature=1.0, top_p=0.95, seed=1, ignore_eos=True
    ),
}


async def drain(stream: Generation) -> tuple[float, float, int]:
    """Read a response; return the times of its first and last tokens in seconds, and their number."""
    first_s, count = 0.0, 0
    async for delta in stream:
        first_s = first_s or time.perf_counter()
        count += len(delta.token_ids)
    return first_s, time.perf_counter(), count


async def rate(engine: Engine, rows: int, sampling: SamplingParams, name: str) -> float:
    """Return the tokens per second of `rows` concurrent requests."""
    prompt = engine.preprocessor.render([{"role": "user", "content": PROMPT}])
    streams = [
        await engine.generate(
            prompt=prompt, images=[], sampling=sampling, request_id=f"{name}-{row}"
        )
        for row in range(rows)
    ]
    read = await asyncio.gather(*(drain(stream) for stream in streams))
    counts = {count for _, _, count in read}
    assert counts == {sampling.max_tokens}, f"answers of {counts} tokens"
    started_s = min(first_s for first_s, _, _ in read)
    return rows * sampling.max_tokens / (max(last_s for _, last_s, _ in read) - started_s)


async def measure(config: Config, options: argparse.Namespace) -> None:
    """Print a table: a line for each number of rows and sampling method."""
    grammar = constraint_from_schema(SCHEMA)
    print("| rows | sampling | free, tokens/s | schema, tokens/s | ratio: median (min to max) |")
    print("|---|---|---|---|---|")
    async with Engine(config) as engine:
        for rows in options.rows:
            for name, sampling in SAMPLINGS.items():
                free = msgspec.structs.replace(sampling, max_tokens=options.tokens)
                held = msgspec.structs.replace(free, grammar=grammar)
                pairs = []
                for turn in range(options.rounds + 1):
                    label = f"{rows}-{name}-{turn}"
                    pair = (
                        await rate(engine, rows, free, f"free-{label}"),
                        await rate(engine, rows, held, f"held-{label}"),
                    )
                    if turn:  # the first round is a warm-up
                        pairs.append(pair)
                print(f"| {rows} | {name} | {pair_cells(pairs, digits=1)} |", flush=True)


def main() -> None:
    """Run the command."""
    parser = options_of("grammars", tokens=96, rounds=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    config = load_config(None, sets=settings_of(options), environ={}).config
    asyncio.run(measure(config, options))


if __name__ == "__main__":
    main()
