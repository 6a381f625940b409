"""Prove the encoder's reservation: `python -m tests.reservation CHECKPOINT --tokens 128 256 512 --batches 1000`.

Reserves for the encoder under a limit on the process, then encodes random legal batches: one budget, one process.
"""

from __future__ import annotations

import argparse
import gc
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from vsched.aio.fork_server import rank_environment
from vsched.types import ModelInfo
from vsched.worker.contract import ImagePlan, WorkerSettings
from vsched.worker.memory import limit_process_memory
from vsched.worker.sizing import BatchArena, reserve_encoder
from vsched.worker.spec import EncodeRole
from vsched_workers.checkpoint.facts import (
    image_factor,
    image_limits,
    processor_settings,
)
from vsched_workers.checkpoint.files import checkpoint_directory, read_json
from vsched_workers.families import family_of
from vsched_workers.families.qwen_image import image_plan, largest_units
from vsched_workers.memory.worst_case import worst_batches
from vsched_workers.plugin import plugin
from vsched_workers.vision import VisionWorker

LIMIT_BYTES = 4 << 30
ITEMS = 8
PIXELS_MAX = 1 << 20
WORST_EVERY = 10
BLOCKS = "run only this number of blocks of the tower, the last over whole images, to save time"


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Memory needs of one budget, in bytes, excluding the loaded worker.

    `above` counts the batches that needed more than was reserved.
    """

    tokens: int
    batches: int
    reserved_bytes: int
    most_bytes: int
    above: int


def measure(path: str, *, tokens: int, batches: int, seed: int, blocks: int) -> Found:
    """Reserve for a budget, then run random batches, and every tenth time one of the worst."""
    limit_process_memory(LIMIT_BYTES, keys="encode.memory_limit")
    gc.collect()
    gc.freeze()
    info = plugin.inspect(path, dtype="auto", item_tokens_max=tokens)
    settings = WorkerSettings()
    worker = plugin.load_encoder(info, settings, lambda *_: None)
    if blocks:
        assert isinstance(worker, VisionWorker)
        tower: Any = worker._tower.module
        tower.blocks = tower.blocks[:blocks]
        tower.fullatt_block_indexes = [blocks - 1]  # both kinds of attention run
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
    """Yield batches of images of any legal shape, most of which use the budget up."""
    directory = checkpoint_directory(info.path)
    config = read_json(directory, "config.json")
    family = family_of(config)
    factor = image_factor(family, config)
    limits = image_limits(family, config, processor_settings(directory), tokens)
    units = largest_units(limits, factor=factor, tokens_max=tokens, pixels_max=PIXELS_MAX)
    merge = int(family.vision(config, "spatial_merge_size"))
    patch, channels = (int(family.vision(config, each)) for each in ("patch_size", "in_channels"))
    least = -(-limits.minimum // (factor * factor))
    while True:
        batch: list[ImagePlan] = []
        left, count = tokens, rng.choice([1, 2, 3, ITEMS, ITEMS])
        while len(batch) < count and (sides := _sides(units, left, least, rng)):
            few, many = sides if rng.random() < 0.5 else sides[::-1]
            grid = (1, few * merge, many * merge)
            batch.append(image_plan(grid, merge=merge, patch=patch, channels=channels))
            left -= few * many
        if batch:
            yield batch


def _sides(
    units: Mapping[int, int], left: int, least: int, rng: random.Random
) -> tuple[int, int] | None:
    """Return the sides of an image of at most `left` tokens, with uniformly drawn short sides."""
    fitting = [
        (few, max(few, -(-least // few)), min(many, left // few)) for few, many in units.items()
    ]
    fitting = [each for each in fitting if each[1] <= each[2]]
    if not fitting:
        return None
    few, lowest, highest = rng.choice(fitting)
    return few, rng.randint(lowest, highest)


def run(
    checkpoint: str,
    *,
    tokens: int,
    batches: int,
    seed: int = 0,
    blocks: int = 0,
    timeout_s: float | None = None,
) -> Found:
    """Measure in a process of its own, as a rank is started: the C library reads its environment at start.

    Raises:
        subprocess.CalledProcessError, subprocess.TimeoutExpired: When it failed, or took too long.
    """
    options = {"tokens": tokens, "batches": batches, "seed": seed, "blocks": blocks}
    words = [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.reservation", checkpoint, "--one", *words],
        env=rank_environment(1),
        stdout=subprocess.PIPE,
        check=True,
        timeout=timeout_s,
    )
    return msgspec.json.decode(done.stdout, type=Found)


def main() -> None:
    """Print what each budget needed; end with status 1 if a batch needed more than was reserved."""
    parser = argparse.ArgumentParser(prog="python -m tests.reservation", description=__doc__)
    parser.add_argument("checkpoint", help="folder of the checkpoint")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 256, 512], help="budgets")
    parser.add_argument("--batches", type=int, default=1000, help="number for each budget")
    parser.add_argument("--seed", type=int, default=0, help="seed of a run")
    parser.add_argument("--blocks", type=int, default=0, help=BLOCKS)
    parser.add_argument("--one", action="store_true", help="measure in this process")
    options = parser.parse_args()
    sizes = {"batches": options.batches, "seed": options.seed, "blocks": options.blocks}
    if options.one:
        found = measure(options.checkpoint, tokens=options.tokens[0], **sizes)
        sys.stdout.write(msgspec.json.encode(found).decode())
        return
    failed = False
    for tokens in options.tokens:
        found = run(options.checkpoint, tokens=tokens, **sizes)
        failed |= found.above > 0
        print(found, flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
