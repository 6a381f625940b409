"""Prove the encoder's reservation: `python -m tests.reservation CHECKPOINT --tokens 128 256 512 --batches 1000`.

Reserves for the encoder under a limit on the process, then encodes random legal batches: one budget, one process.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
from collections.abc import Iterator
from math import isqrt

import msgspec

from tests.programs import printed_by
from vsched.types import ModelInfo
from vsched.worker.contract import ImagePlan, WorkerSettings
from vsched.worker.memory import limit_process_memory
from vsched.worker.sizing import BatchArena, reserve_encoder
from vsched.worker.spec import EncodeRole
from vsched_workers.memory.worst_case import worst_batches
from vsched_workers.plugin import plugin

LIMIT_BYTES = 4 << 30
ITEMS = 8
PIXELS_MAX = 1 << 20
WORST_EVERY = 10
RATIO_MAX = 100
"""Maximum ratio of the sides of an image; from 200 on it is refused."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Memory needs of one budget, in bytes, excluding the loaded worker.

    `above` counts the batches that needed more than was reserved.
    """

    tokens: int
    batches: int
    reserved_bytes: int
    most_bytes: int
    above: int


def measure(path: str, *, tokens: int, batches: int, seed: int) -> Found:
    """Reserve for a budget, then run random batches, and every tenth time one of the worst."""
    limit_process_memory(LIMIT_BYTES, keys="encode.memory_limit")
    gc.collect()
    gc.freeze()
    info = plugin.inspect(path, dtype="auto", item_tokens_max=tokens)
    settings = WorkerSettings()
    worker = plugin.load_encoder(info, settings, lambda *_: None)
    role = EncodeRole(
        address="", plugin="", settings=settings, items=ITEMS, tokens=tokens, pixels_max=PIXELS_MAX
    )
    loaded, reservation = reserve_encoder(plugin, worker, info, role)
    worst = worst_batches(info, items=ITEMS, tokens=tokens, pixels_max=PIXELS_MAX)
    drawn = random_batches(info, tokens, random.Random(seed))
    chosen = [
        next(drawn) if index % WORST_EVERY else worst[index // WORST_EVERY % len(worst)]
        for index in range(batches)
    ]
    arena, memory = BatchArena(info, chosen), worker.device_memory()
    most = above = 0
    for batch in chosen:
        memory.reset_peak()
        worker.encode(arena.jobs(batch), arena.embeddings)
        needed = memory.peak() - loaded.reserved_bytes
        most = max(most, needed)
        above += needed > reservation.growth_bytes
    return Found(
        tokens=tokens,
        batches=batches,
        reserved_bytes=reservation.growth_bytes,
        most_bytes=most,
        above=above,
    )


def random_batches(info: ModelInfo, tokens: int, rng: random.Random) -> Iterator[list[ImagePlan]]:
    """Yield batches of images of any shape, most of which use the budget up."""
    plan = plugin.load_preprocessor(info).plan_image
    token_pixels = 224 * 224 / plan(224, 224).tokens
    while True:
        batch: list[ImagePlan] = []
        left = tokens
        for remaining in range(rng.choice([1, 2, 3, ITEMS, ITEMS]), 0, -1):
            area = min(
                PIXELS_MAX, int(token_pixels * left / remaining * rng.uniform(0.6, 1.05)) + 1
            )
            short = rng.randint(isqrt(area // RATIO_MAX) + 1, isqrt(area) + 1)
            made = plan(*rng.sample((short, area // short + 1), 2))
            if made.tokens <= left:
                batch.append(made)
                left -= made.tokens
        if batch:
            yield batch


PROGRAM = """
import sys, msgspec
from tests.reservation.__main__ import measure
tokens, batches, seed = map(int, sys.argv[2:])
found = measure(sys.argv[1], tokens=tokens, batches=batches, seed=seed)
sys.stdout.write(msgspec.json.encode(found).decode())
"""


def run(checkpoint: str, *, tokens: int, batches: int, seed: int, limit_s: float) -> Found:
    """Measure in a process of its own, as a rank is started: the C library reads its environment at start."""
    words = (checkpoint, tokens, batches, seed)
    printed = printed_by(PROGRAM, *words, as_rank=True, limit_s=limit_s)
    return msgspec.json.decode(printed, type=Found)


def main() -> None:
    """Print what each budget needed; end with status 1 if a batch needed more than was reserved."""
    parser = argparse.ArgumentParser(prog="python -m tests.reservation", description=__doc__)
    parser.add_argument("checkpoint", help="folder of the checkpoint")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 256, 512], help="budgets")
    parser.add_argument("--batches", type=int, default=1000, help="number for each budget")
    parser.add_argument("--seed", type=int, default=0, help="seed of a run")
    options = parser.parse_args()
    failed = False
    for tokens in options.tokens:
        sizes = {"tokens": tokens, "batches": options.batches, "seed": options.seed}
        found = run(options.checkpoint, **sizes, limit_s=options.batches)
        failed |= found.above > 0
        print(found, flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
