"""`python -m tests.bench.drafts CHECKPOINT`: requests per second with and without speculative decoding.

Engines serve in turns: one with `generate.drafting` of `none`, one with `prompt-lookup`, and with
`--draft-model DIR` one with that draft model. A round is a number of concurrent greedy requests of
one length. There are two kinds of text: *repetitive* ones ask for a copy of their content,
*ordinary* ones for prose. Every ratio compares one round with the same round of `none`.

In float32, and with `model.deterministic`, all outputs are equal, and `--equal` asserts it.
Otherwise sums over several rows may round differently from those over one, and the table shows the
number of equal outputs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
NONE = "none"
HEADER = """\
| text | clients | drafts | none, requests/s | with, requests/s | ratio | accepted | same answers |
|---|--:|---|--:|--:|---|--:|--:|"""
Answers = list[list[int]]


@dataclass
class Way:
    """One engine, and its rounds of one cell.

    Attributes:
        pairs: For each round, the rates of `none` and of this engine.
        same: Number of outputs, out of `answers`, equal to those of `none`.
        counts: Drafted and accepted tokens before the first round.
    """

    engine: Engine
    pairs: list[tuple[float, float]] = field(default_factory=list)
    same: int = 0
    answers: int = 0
    counts: tuple[int, int] = (0, 0)

    def begin(self) -> None:
        """Reset for the next cell."""
        self.pairs, self.same, self.answers, self.counts = [], 0, 0, self.counted()

    def counted(self) -> tuple[int, int]:
        """Return drafted and accepted tokens since the start."""
        counts = self.engine.statistics()["generate"]
        return counts["tokens_drafted"], counts["drafts_accepted"]

    def take(self, plain: tuple[float, Answers], own: tuple[float, Answers]) -> None:
        """Add a round."""
        self.pairs.append((plain[0], own[0]))
        self.same += sum(one == other for one, other in zip(plain[1], own[1], strict=True))
        self.answers += len(own[1])

    def cells(self) -> str:
        """Return the table cells of its line."""
        drafted, accepted = (
            now - before for now, before in zip(self.counted(), self.counts, strict=True)
        )
        share = f"{accepted / drafted:.0%} of {drafted}" if drafted else "none drafted"
        return f"{pair_cells(self.pairs, digits=3)} | {share} | {self.same} of {self.answers}"


async def drain(engine: Engine, text: str, sampling: SamplingParams, name: str) -> list[int]:
    """Send a request and return the output tokens."""
    prompt = engine.preprocessor.render([{"role": "user", "content": text}])
    stream = await engine.generate(prompt=prompt, images=[], sampling=sampling, request_id=name)
    return [token async for delta in stream for token in delta.token_ids]


async def rate(
    engine: Engine, texts: Sequence[str], sampling: SamplingParams, name: str, *, clients: int
) -> tuple[float, Answers]:
    """Return the requests per second of concurrent clients that share all texts, at least one each, and the outputs."""
    count = max(clients, len(texts))

    answers: Answers = [[]] * count

    async def client(number: int) -> None:
        for index in range(number, count, clients):
            text = texts[index % len(texts)]
            answers[index] = await drain(engine, text, sampling, f"{name}-{index}")

    started_s = time.perf_counter()
    await asyncio.gather(*map(client, range(clients)))
    return count / (time.perf_counter() - started_s), answers


def say(line: str) -> None:
    """Report progress."""
    print(line, file=sys.stderr, flush=True)


async def fill(
    ways: Mapping[str, Way], kind: str, clients: int, until_s: float, options: argparse.Namespace
) -> None:
    """Run rounds of one cell: the given number, or as many as there is time for, but at least one."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=options.tokens)
    for turn in range(options.rounds + 1):
        began_s = time.perf_counter()
        found = {
            name: await rate(
                way.engine, TEXTS[kind], sampling, f"{kind}-{clients}-{turn}", clients=clients
            )
            for name, way in ways.items()
        }
        for name, way in ways.items():
            if turn:
                way.take(found[NONE], found[name])
            else:  # the first round is a warm-up
                way.begin()
        now_s = time.perf_counter()
        rates = ", ".join(f"{name} {one:.3f}" for name, (one, _) in found.items())
        say(f"{kind} x {clients}, round {turn} of {options.rounds}, requests/s: {rates}")
        if turn and now_s + (now_s - began_s) > until_s:
            return


async def measure(options: argparse.Namespace) -> None:
    """Print a table: a line for each kind of text, number of clients, and drafting method."""
    ways: dict[str, Way] = {}
    try:
        for name, sets in settings_by_way(options).items():
            say(f"starting {name}")
            engine = Engine(load_config(None, sets=sets, environ={}).config)
            ways[name] = Way(engine)
            await engine.start()
        print(HEADER, flush=True)
        cells = [(clients, kind) for clients in options.clients for kind in TEXTS]
        ends_s = time.perf_counter() + 60 * options.minutes
        for index, (clients, kind) in enumerate(cells):
            now_s = time.perf_counter()
            share_s = (ends_s - now_s) / (len(cells) - index)
            await fill(ways, kind, clients, now_s + share_s, options)
            for name, way in ways.items():
                if name != NONE:
                    print(f"| {kind} | {clients} | {name} | {way.cells()} |", flush=True)
                    assert way.same == way.answers or not options.equal, (
                        "drafting changed an output"
                    )
    finally:
        for way in ways.values():
            await way.engine.stop()


def settings_by_way(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the settings of each engine, by drafting method."""
    common = settings_of(options)
    ways = {
        name: [f'generate.drafting={{use="{name}"}}', *common] for name in (NONE, "prompt-lookup")
    }
    if options.draft_model:
        ways["draft-model"] = [
            f'generate.draft_model="{options.draft_model}"',
            'generate.drafting={use="draft-model"}',
            *common,
        ]
    return ways


def main() -> None:
    """Run the command."""
    parser = options_of("drafts", tokens=128, rounds=3)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--draft-model", default="", help="checkpoint of the draft model")
    parser.add_argument(
        "--minutes", type=float, default=12.0, help="once all serve; rounds are left out to keep it"
    )
    parser.add_argument("--equal", action="store_true", help="fail if an output differs")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
