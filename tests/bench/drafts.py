"""`python -m tests.bench.drafts CHECKPOINT`: requests a second with and without prompt lookup, on two kinds of text.

Two engines serve in turns, one with `generate.drafting` of `none` and one of `prompt-lookup`: rounds of greedy requests
of one length, so many at a time. *Repetitive* texts ask for a copy of what they hold, *ordinary* ones for prose. The
answers of both engines must be equal, and every ratio is of one round.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

from tests.bench.options import options_of, settings_of
from tests.bench.report.pairs import pair_cells
from vsched import Engine, SamplingParams
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


async def drain(engine: Engine, text: str, sampling: SamplingParams, name: str) -> list[int]:
    """Ask and return the tokens of the answer."""
    prompt = engine.preprocessor.render([{"role": "user", "content": text}])
    stream = await engine.generate(prompt=prompt, images=[], sampling=sampling, request_id=name)
    return [token async for delta in stream for token in delta.token_ids]


async def rate(
    engine: Engine, texts: Sequence[str], sampling: SamplingParams, name: str, *, clients: int
) -> tuple[float, list[list[int]]]:
    """Return the requests a second of so many clients, each with its turn of all texts, and the answers."""

    async def client(number: int) -> list[list[int]]:
        return [
            await drain(engine, text, sampling, f"{name}-{number}-{index}")
            for index, text in enumerate(texts)
        ]

    started_s = time.perf_counter()
    found = await asyncio.gather(*map(client, range(clients)))
    took_s = time.perf_counter() - started_s
    return clients * len(texts) / took_s, [one for answers in found for one in answers]


async def measure(options: argparse.Namespace) -> None:
    """Print a table: a line for each kind of text and number of clients."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=options.tokens)
    print("| text | clients | none, requests/s | lookup, requests/s | ratio | drafts accepted |")
    print("|---|--:|--:|--:|---|--:|")
    plain = await started("none", options)
    lookup = await started("prompt-lookup", options)
    try:
        for clients in options.clients:
            for kind, texts in TEXTS.items():
                pairs = []
                before = lookup.statistics()["generate"]
                for turn in range(options.rounds + 1):
                    name = f"{kind}-{clients}-{turn}"
                    one, wanted = await rate(plain, texts, sampling, name, clients=clients)
                    other, found = await rate(lookup, texts, sampling, name, clients=clients)
                    assert options.differ or found == wanted, "drafts changed an answer"
                    if turn:  # the first round warms
                        pairs.append((one, other))
                after = lookup.statistics()["generate"]
                drafts, right = (
                    after[key] - before[key] for key in ("tokens_drafted", "drafts_accepted")
                )
                cells = pair_cells(pairs, digits=3)
                share = right / max(drafts, 1)
                print(f"| {kind} | {clients} | {cells} | {share:.0%} |", flush=True)
    finally:
        await plain.stop()
        await lookup.stop()


async def started(policy: str, options: argparse.Namespace) -> Engine:
    """Return an engine that serves with a drafting policy."""
    sets = [f'generate.drafting={{use="{policy}"}}', *settings_of(options)]
    engine = Engine(load_config(None, sets=sets, environ={}).config)
    await engine.start()
    return engine


def main() -> None:
    """Run the command."""
    parser = options_of("drafts", tokens=128, rounds=3)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4])
    parser.add_argument(
        "--differ", action="store_true", help="let answers differ: in bfloat16 sums round otherwise"
    )
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
