"""`python -m tests.bench adapters CHECKPOINT`: cost of LoRA adapters, compared with requests without adapters.

One generate worker has no adapters; another has the given number of random ones, on all linear
layers. In each round both run the same rows in turns: rows of one prompt length that are prefilled
together and then decode together. Row i has adapter i modulo their number; with 0 adapters, the
second worker runs rows without one. `--peft` runs PEFT's own batch of several adapters
(`adapter_names`) on transformers' model with a cache, in float32.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM

from tests.bench.report.pairs import spread
from tests.workers import driver
from tests.workers.driver import Driver, Question, Running, Stage
from vsched.worker.contract import WorkerSettings
from vsched_workers.adapters.files import Adapter, LowRankPair

BLOCK_SIZE = 16
HEAD = (
    "| | adapters | rows | decode, tokens/s | relative to none (range) | prefill, s | relative to none (range) |\n"
    "|---|---:|---:|---:|---:|---:|---:|"
)


@dataclass(frozen=True)
class Round:
    """Seconds of a prefill, and tokens per second of the decode after it."""

    prefill_s: float
    decode_rate: float


def line(name: str, adapters: int, rows: int, rounds: Sequence[tuple[Round, Round]]) -> str:
    """Return a row of the table, from pairs of rounds without and with adapters."""
    decode = [on.decode_rate / off.decode_rate for off, on in rounds]
    prefill = [on.prefill_s / off.prefill_s for off, on in rounds]
    rate = statistics.median(on.decode_rate for _, on in rounds)
    seconds = statistics.median(on.prefill_s for _, on in rounds)
    cells = [f"{rate:.1f}", spread(decode), f"{seconds:.3f}", spread(prefill)]
    return f"| {name} | {adapters} | {rows} | {' | '.join(cells)} |"


class _TimedDriver(Driver):
    """Times prefill and decode steps."""

    def __init__(self, stage: Stage, chunk: int) -> None:
        super().__init__(stage, chunk=chunk)
        self.prefill_s = self.decode_s = 0.0

    def step(self, active: Sequence[Running]) -> None:
        began = any(not len(each.sequence.outputs) for each in active)
        before = time.perf_counter()
        super().step(active)
        spent_s = time.perf_counter() - before
        if began:
            self.prefill_s += spent_s
        else:
            self.decode_s += spent_s


class Ours:
    """Two generate workers, one of them with adapters."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Load the model and create the adapters."""
        count = max(options.adapters)
        self._without, self._with = (
            Stage.load(
                options.folder,
                attention="auto",
                dtype=options.dtype,
                settings=WorkerSettings(
                    threads=options.threads, adapters=number, adapter_rank_max=options.rank
                ),
            )
            for number in (0, count)
        )
        self._options = options
        worker: Any = self._with.generator
        for number in range(1, count + 1):
            worker._served.add(number, _chance(worker, options.rank, number))

    def round(self, rows: int, adapters: int | None) -> Round:
        """Run rows to their end; None uses the worker without adapters."""
        options = self._options
        stage = self._without if adapters is None else self._with
        prompt = [10 + index % 200 for index in range(options.prompt)]
        questions = [
            Question(prompt, count=options.tokens, adapter=1 + row % adapters if adapters else 0)
            for row in range(rows)
        ]
        timed = _TimedDriver(stage, chunk=options.prompt)
        timed.run(questions)
        return Round(timed.prefill_s, rows * (options.tokens - 1) / timed.decode_s)


def _chance(worker: Any, rank: int, seed: int) -> Adapter:
    """Return a random adapter for all supported layers."""
    chance = torch.Generator().manual_seed(seed)
    pairs = {}
    module = worker._served
    for name, (place, *_) in sorted(module._places.items()):
        down = torch.randn(rank, place.inputs, generator=chance) * place.inputs**-0.5
        up = torch.randn(place.outputs, rank, generator=chance) * 0.01
        pairs[f"{module._prefixes[0]}{name}"] = LowRankPair(down, up, 1.0)
    return Adapter(pairs)


class Peft:
    """transformers' model with PEFT's adapters, in float32; each row of a batch has its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Load the model and create the adapters."""
        import peft

        model: Any = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
        settings = peft.LoraConfig(r=options.rank, target_modules="all-linear")
        self._model: Any = peft.get_peft_model(model, settings, adapter_name="1")
        for number in range(2, max(options.adapters) + 1):
            self._model.add_adapter(str(number), settings)
        self._model.eval()
        self._options = options

    @torch.inference_mode()
    def round(self, rows: int, adapters: int | None) -> Round:
        """Run rows to their end."""
        options = self._options
        ids = torch.arange(options.prompt).remainder(200).add(10).expand(rows, -1)
        names = [str(1 + row % adapters) if adapters else "__base__" for row in range(rows)]
        given: dict[str, Any] = {"adapter_names": names, "use_cache": True}
        with contextlib.nullcontext() if adapters else self._model.disable_adapter():
            if not adapters:
                del given["adapter_names"]
            before = time.perf_counter()
            out = self._model(input_ids=ids, **given)
            prefill_s = time.perf_counter() - before
            before = time.perf_counter()
            for _ in range(options.tokens - 1):
                ids = out.logits[:, -1:].argmax(-1)
                out = self._model(input_ids=ids, past_key_values=out.past_key_values, **given)
            decode_s = time.perf_counter() - before
        return Round(prefill_s, rows * (options.tokens - 1) / decode_s)


def measure(
    name: str, side: Ours | Peft, options: argparse.Namespace
) -> Iterator[tuple[str, Sequence[tuple[Round, Round]]]]:
    """Yield lines of the table, with their data."""
    for rows in options.rows:
        side.round(rows, None)  # compilation on first use is not measured
        for adapters in (0, *options.adapters):
            side.round(rows, adapters)
            rounds = [
                (side.round(rows, None), side.round(rows, adapters)) for _ in range(options.rounds)
            ]
            yield line(name, adapters, rows, rounds), rounds


def adapters(options: argparse.Namespace) -> None:
    """Print a table with a line for each number of rows and adapters."""
    torch.set_num_threads(options.threads)
    blocks = -(-(options.prompt + options.tokens + 1) // BLOCK_SIZE)
    sizes = {
        "BLOCK_SIZE": BLOCK_SIZE,
        "TABLE_BLOCKS": blocks,
        "BLOCKS": blocks * max(options.rows),
        "SLOTS": max(options.rows),
    }
    print(HEAD, flush=True)  # a table for a document, whatever the width of the terminal
    with mock.patch.dict(vars(driver), sizes):
        for text, _ in measure(f"vsched, {options.dtype}", Ours(options), options):
            print(text, flush=True)
    if options.peft:
        for text, _ in measure("PEFT, float32", Peft(options), options):
            print(text, flush=True)
