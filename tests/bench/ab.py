"""`python -m tests.bench.ab CHECKPOINT --b KEY=VALUE`: two engines in turns, the second with other settings.

A round is a number of concurrent greedy requests of one length on each engine. There are two kinds of text:
*repetitive* ones ask for a copy of their content, *ordinary* ones for prose. With `--schema`, the second engine
generates JSON that matches a schema. Every ratio compares two rounds of the same number. In float32, and with
`model.deterministic`, outputs are equal under most settings; otherwise sums over several rows may round differently
from those over one.

    python -m tests.bench.ab checkpoints/smollm2 --b generate.drafting.use=prompt-lookup
    python -m tests.bench.ab checkpoints/smollm2 --b generate.kv_dtype=int8 --clients 64
    python -m tests.bench.ab checkpoints/smollm2 --b model.deterministic=true
    python -m tests.bench.ab checkpoints/smollm2 --schema
"""

from __future__ import annotations

import argparse
import asyncio
import operator
import os
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tests.bench.report import spread
from tests.bench.servers.processes import cpu_s, family
from vsched import Engine, SamplingParams
from vsched.api.structured_outputs import constraint_from_schema
from vsched.config import load_config

LIST = "\n".join(
    f'{{"id": {number}, "kind": "car", "colour": "red", "seen": true, "street": "Main Street"}}'
    for number in range(1, 13)
)
TEXTS = {
    "repetitive": [
        f"Copy these lines, and go on with the next ones:\n{LIST}",
        f"Repeat this table word for word:\n{LIST}",
        f"Write the same lines again with blue in place of red:\n{LIST}",
    ],
    "ordinary": [
        "Tell a story about a fisherman who finds a letter in a bottle.",
        "Explain to a child why the sky is blue and the evening is red.",
        "What should somebody know who wants to grow tomatoes on a balcony?",
    ],
}
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["car", "person", "dog"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["name", "kind", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 200}
"""Longer than any output here, so that none ends early."""
HEADER = """\
| text | clients | requests/s | the other | ratio | CPU time, ratio | same answers | drafts accepted | preemptions |
|---|--:|--:|--:|---|---|--:|--:|--:|"""
ANSWER_TOKENS = 128
COUNTS = ("tokens_drafted", "drafts_accepted", "preemptions")


class Round(NamedTuple):
    """Rate, CPU seconds of all processes, and outputs of concurrent requests."""

    requests_s: float
    cpu_s: float
    answers: list[list[int]]


async def drain(engine: Engine, text: str, sampling: SamplingParams, name: str) -> list[int]:
    """Send a request and return the output tokens."""
    prompt = engine.preprocessor.render([{"role": "user", "content": text}])
    stream = await engine.generate(prompt=prompt, sampling=sampling, request_id=name)
    return [token async for delta in stream for token in delta.token_ids]


async def run_round(
    engine: Engine, texts: Sequence[str], sampling: SamplingParams, name: str, *, clients: int
) -> Round:
    """Let concurrent clients share all texts, at least one each."""
    count = max(clients, len(texts))
    answers: list[list[int]] = [[]] * count

    async def client(number: int) -> None:
        for index in range(number, count, clients):
            text = texts[index % len(texts)]
            answers[index] = await drain(engine, text, sampling, f"{name}-{index}")

    pids = family(os.getpid())
    spent_s, began_s = cpu_s(pids), time.perf_counter()
    await asyncio.gather(*map(client, range(clients)))
    return Round(count / (time.perf_counter() - began_s), cpu_s(pids) - spent_s, answers)


async def measure(options: argparse.Namespace) -> None:
    """Print the table as its lines come, one for each kind of text and number of clients."""
    common = [f"model.path={options.checkpoint}", "model.name=bench", *options.set]
    plain = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=ANSWER_TOKENS)
    grammar = constraint_from_schema(SCHEMA) if options.schema else plain.grammar
    samplings = plain, msgspec.structs.replace(plain, grammar=grammar)
    async with (
        Engine(load_config(None, sets=common, environ={}).config) as one,
        Engine(load_config(None, sets=[*common, *options.b], environ={}).config) as other,
    ):
        print(HEADER, flush=True)
        for clients in options.clients:
            for kind, texts in TEXTS.items():
                before: dict[str, int] = {}
                pairs: list[tuple[Round, Round]] = []
                for turn in range(options.rounds + 1):
                    name = f"{kind}-{clients}-{turn}"
                    first, second = [
                        await run_round(engine, texts, sampling, name, clients=clients)
                        for engine, sampling in zip((one, other), samplings, strict=True)
                    ]
                    if turn:
                        pairs.append((first, second))
                    else:  # the first round is a warm-up
                        before = other.statistics()["generate"]
                now = other.statistics()["generate"]
                counts = [now[name] - before[name] for name in COUNTS]
                print(line(kind, clients, pairs, counts), flush=True)


def line(
    kind: str, clients: int, pairs: Sequence[tuple[Round, Round]], counts: Sequence[int]
) -> str:
    """Return a row of the table: medians, and ratios within each round."""
    rates = [
        statistics.median(each.requests_s for each in side) for side in zip(*pairs, strict=True)
    ]
    answers: list[bool] = []
    for first, second in pairs:
        answers += map(operator.eq, first.answers, second.answers)
    drafted, accepted, preemptions = counts
    cells = (
        *(kind, str(clients), *(f"{rate:.3f}" for rate in rates)),
        spread([second.requests_s / first.requests_s for first, second in pairs]),
        spread([second.cpu_s / max(first.cpu_s, 0.01) for first, second in pairs]),
        f"{sum(answers)} of {len(answers)}",
        f"{accepted / drafted:.0%} of {drafted}" if drafted else "none",
        str(preemptions),
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.ab")
    parser.add_argument("checkpoint")
    parser.add_argument("--set", action="append", default=[], help="a setting of both engines")
    parser.add_argument("--b", action="append", default=[], help="a setting of the second one")
    parser.add_argument("--schema", action="store_true", help="JSON from the second one")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
