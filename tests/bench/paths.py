"""`python -m tests.bench.paths CHECKPOINT`: CPU time of a model by its family's code and by the generic path.

Both are loaded into one process and take turns: steps of some decode rows, and chunks of a prompt.
Figures are CPU time of the process in microseconds per token, as medians of the rounds, and ratios
within each round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from unittest import mock

import numpy as np

from vsched.types import SamplingParams
from vsched.worker.contract import Batch, Chunk, GenerateWorker, SequenceState, WorkerSettings
from vsched_workers.families import language_family
from vsched_workers.plugin import plugin

BLOCK = 16
STEPS = 16
KINDS: Sequence[tuple[str, int, int]] = (
    ("decode, 1 row", 1, 0),
    ("decode, 8 rows", 8, 0),
    ("decode, 32 rows", 32, 0),
    ("prefill, 128 tokens", 0, 128),
    ("prefill, 512 tokens", 0, 512),
)
"""Name, number of decode rows, and number of rows of the chunk."""


def load(path: str, *, generic: bool, threads: int, blocks: int) -> GenerateWorker:
    """Load a checkpoint's language model with its family's code or on the generic path."""
    info = plugin.inspect(path, dtype="auto", item_tokens_max=0)
    settings = WorkerSettings(threads=threads)
    chosen = (lambda *_: None) if generic else language_family
    with mock.patch("vsched_workers.language.language_family", chosen):
        worker = plugin.load_generator(info, settings, lambda _label, _fraction: None)
    worker.build_kv(blocks=blocks, block_size=BLOCK)
    return worker


def sequence(worker: GenerateWorker, number: int, length: int) -> SequenceState:
    """Return a request of random tokens."""
    tokens = np.random.default_rng(number).integers(10, 2000, length + 2).astype(np.int32)
    made = SequenceState(
        number=number,
        tokens=tokens,
        length=length,
        prompt_length=length,
        items=[],
        sampling=SamplingParams(temperature=0.0),
        stop_token_ids=frozenset(),
    )
    worker.prepare(made)
    return made


def batch_of(worker: GenerateWorker, rows: int, chunk: int, context: int) -> Batch:
    """Return a step of decode rows, or of one chunk at the beginning of a prompt."""
    per_request = -(-max(context, chunk) // BLOCK) + 1
    tables = np.arange(max(rows, 1) * per_request, dtype=np.int32).reshape(-1, per_request)
    requests = [sequence(worker, number, context) for number in range(rows)]
    chunks = []
    if chunk:
        made = sequence(worker, 0, chunk)
        chunks.append(Chunk(slot=0, sequence=made, start=0, stop=chunk, samples=True, items=[]))
    return Batch(
        decode_slots=np.arange(rows, dtype=np.int32),
        decode_tokens=np.array([each.tokens[context - 1] for each in requests], dtype=np.int32),
        decode_positions=np.full(rows, context - 1, dtype=np.int32),
        decode_sequences=requests,
        block_tables=tables,
        embeddings=np.zeros((1, 1, 0), dtype=np.uint8),
        chunks=chunks,
        special=[],
    )


def cpu_us(worker: GenerateWorker, batch: Batch, steps: int) -> float:
    """Return the mean CPU time of a step in microseconds."""
    start = time.process_time_ns()
    for _ in range(steps):
        worker.step(batch)
    return (time.process_time_ns() - start) / steps / 1000


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.paths")
    parser.add_argument("checkpoint")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=400, help="tokens before each decode row")
    options = parser.parse_args()
    blocks = 32 * (options.context // BLOCK + 2) + 64
    load_one = partial(load, options.checkpoint, threads=options.threads, blocks=blocks)
    workers = load_one(generic=False), load_one(generic=True)
    print("| step | own path, us a token | generic, us a token | ratio: median (min to max) |")
    print("|---|---|---|---|")
    for name, rows, chunk in KINDS:
        batches = [batch_of(worker, rows, chunk, options.context) for worker in workers]
        pairs = []
        for turn in range(options.rounds + 1):
            steps = STEPS if rows else 1
            pair = [
                cpu_us(worker, batch, steps) / (rows or chunk)
                for worker, batch in zip(workers, batches, strict=True)
            ]
            if turn:  # the first one is a warm-up
                pairs.append(pair)
        own, other = (statistics.median(each) for each in zip(*pairs, strict=True))
        ratios = sorted(one / two for one, two in pairs)
        middle = statistics.median(ratios)
        print(
            f"| {name} | {own:,.0f} | {other:,.0f} | {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
