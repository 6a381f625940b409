"""Cost of `model.deterministic`: CPU time of the same steps on two workers in turns, one of them deterministic."""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import torch

from tests.workers import driver
from tests.workers.driver import Driver, Question, Running, Stage
from vsched.worker.contract import WorkerSettings

BLOCK_SIZE = 16
TOKENS_A_WORD = 4
"""More than any tokenizer yields for these words."""
WORDS = ["scheduler", "image", "token", "answer", "question", "of", "the", "memory", "page"]
ROUND_S = 0.5
"""A round repeats a load for about this time, because a step of a small model takes half a millisecond."""


@dataclass(frozen=True)
class Load:
    """Requests that begin together: words of a prompt, output tokens, and maximum rows of a chunk."""

    words: int
    tokens: int
    chunk: int
    requests: int = 4

    @property
    def questions(self) -> list[Question]:
        draw = random.Random(self.words)
        return [
            Question(" ".join(draw.choices(WORDS, k=self.words)), count=self.tokens)
            for _ in range(self.requests)
        ]

    @property
    def blocks(self) -> int:
        """Return the maximum KV blocks of a request."""
        return -(-(TOKENS_A_WORD * self.words + self.tokens + 100) // BLOCK_SIZE)


@dataclass(frozen=True)
class Price:
    """Results: for each round the CPU seconds of all steps without the setting and with it."""

    load: Load
    prompt_tokens: int
    seconds: Sequence[tuple[float, float]]

    @property
    def ratios(self) -> list[float]:
        return sorted(on / off for off, on in self.seconds)

    def line(self) -> str:
        """Return a row of the table."""
        off_s, on_s = (statistics.median(each) for each in zip(*self.seconds, strict=True))
        ratios = self.ratios
        return (
            f"| {self.prompt_tokens:,} | {self.load.tokens} | {self.load.chunk:,} | {off_s:.3f} | {on_s:.3f} "
            f"| {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) | {len(ratios)} |"
        )


HEAD = (
    "| prompt tokens | tokens out | rows of a chunk | off, s | on, s | on / off (range) | rounds |\n"
    "|---:|---:|---:|---:|---:|---:|---:|"
)


class _TimedDriver(Driver):
    """Measures the CPU time of steps, over all threads; the rest, such as tokenization, is the same for both."""

    seconds = 0.0

    def step(self, active: Sequence[Running]) -> None:
        before = time.process_time()
        super().step(active)
        self.seconds += time.process_time() - before


def measure(checkpoint: str, load: Load, *, rounds: int, threads: int) -> Price:
    """Run `rounds` rounds of a load on each worker, in turns, after a warm-up."""
    sizes = {
        "BLOCK_SIZE": BLOCK_SIZE,
        "TABLE_BLOCKS": load.blocks,
        "BLOCKS": load.blocks * load.requests,
    }
    with mock.patch.dict(vars(driver), sizes):
        stages = [
            Stage.load(
                checkpoint,
                attention="auto",
                dtype="bfloat16",
                settings=WorkerSettings(threads=threads, deterministic=deterministic),
            )
            for deterministic in (False, True)
        ]
        questions = load.questions

        def run(stage: Stage, times: int = 1) -> tuple[float, int]:
            drivers = [_TimedDriver(stage, chunk=load.chunk) for _ in range(times)]
            every = [one.run(questions) for one in drivers]
            return sum(one.seconds for one in drivers) / times, every[0][0].sequence.prompt_length

        for stage in stages:
            warm_s, prompt_tokens = run(stage)
        times = max(1, round(ROUND_S / warm_s))
        taken: list[tuple[float, float]] = []
        for number in range(rounds):
            # Alternate the order, so that neither always runs on the caches left by the other.
            order = (0, 1) if number % 2 else (1, 0)
            found = {each: run(stages[each], times)[0] for each in order}
            taken.append((found[0], found[1]))
    return Price(load, prompt_tokens, taken)


def price(options: argparse.Namespace) -> None:
    """Print a table, a line for each combination of prompt, output and chunk length."""
    torch.set_num_threads(options.threads)
    print(HEAD, flush=True)  # a table for a document, whatever the width of the terminal
    for words, tokens, chunk in itertools.product(options.words, options.tokens, options.chunk):
        load = Load(words, tokens, chunk, options.requests)
        found = measure(options.folder, load, rounds=options.rounds, threads=options.threads)
        print(found.line(), flush=True)
