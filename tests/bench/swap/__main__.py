"""`python -m tests.bench.swap CHECKPOINT`: gain of swapping over recomputation, by prompt length.

One rank executes decisions, as in a server. For each length it computes a prompt in chunks, then
swaps the request out, and back in with its next token; the table shows medians of the rounds. The
steps contain nothing else, so the time of a copy is the delay of other requests.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import NamedTuple

import numpy as np

from vsched.kernel.decisions import (
    ChunkPlan,
    GenerateDecision,
    Join,
    Leave,
    RequestData,
    SwapCopies,
)
from vsched.types import ModelInfo, SamplingParams
from vsched.worker.contract import WorkerSettings, supports
from vsched.worker.generate_rank import GenerateRank
from vsched_workers.plugin import plugin

BLOCK_SIZE = 16
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)


class Row(NamedTuple):
    """Milliseconds for one length: recomputation, swap-out, and swap-in with one step."""

    tokens: int
    mib: float
    recompute_ms: float
    out_ms: float
    back_ms: float

    @property
    def gain(self) -> float:
        """Recomputation time divided by the time of swap-out and swap-in."""
        return self.recompute_ms / (self.out_ms + self.back_ms)


class Bench:
    """One rank, with one request at a time in slot 0."""

    def __init__(self, info: ModelInfo, *, longest: int, threads: int, chunk: int) -> None:
        blocks = -(-longest // BLOCK_SIZE) + 2
        settings = WorkerSettings(threads=threads, slots=1)
        worker = plugin.load_generator(info, settings, lambda _what, _fraction: None)
        worker.build_kv(blocks=2 * blocks, block_size=BLOCK_SIZE)
        assert supports(worker, "build_swap"), "this plug-in cannot swap"
        worker.build_swap(blocks)
        self._info, self._chunk, self._blocks = info, chunk, blocks
        self._rank = GenerateRank(
            worker,
            np.zeros((1, 1, max(info.embedding_row_bytes, 1)), np.uint8),
            slots=1,
            context_tokens=longest + 8,
            block_size=BLOCK_SIZE,
            swap_blocks=blocks,
        )
        self._step = self._number = 0
        self._rng = random.Random(0)

    def _apply(self, **changes: object) -> float:
        """Execute a decision; return its duration in milliseconds."""
        self._step += 1
        decision = GenerateDecision(self._step, **changes)  # type: ignore[arg-type]
        start_s = time.perf_counter()
        self._rank.apply(decision)
        return 1000 * (time.perf_counter() - start_s)

    def once(self, tokens: int) -> tuple[float, float, float]:
        """Compute a prompt, swap it out and in; return the duration of each in milliseconds."""
        self._number = number = self._number + 1
        special = {self._info.image_token_id, self._info.placeholder}
        prompt = [self._rng.randrange(self._info.vocab_size) for _ in range(tokens)]
        prompt = [token if token not in special else 0 for token in prompt]
        sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        data = RequestData(np.array(prompt, np.int32).tobytes(), tokens, [], sampling, ())
        count = -(-(tokens + 1) // BLOCK_SIZE)
        first, second = range(count), range(self._blocks, self._blocks + count)
        join = Join(number, 0, 0, tokens, list(first)[: -(-tokens // BLOCK_SIZE)], data)
        recompute_ms = 0.0
        for start in range(0, tokens, self._chunk):
            stop = min(start + self._chunk, tokens)
            recompute_ms += self._apply(
                joined=[] if start else [join], chunks=[ChunkPlan(0, start, stop, [])]
            )
        kept = -(-tokens // BLOCK_SIZE)
        out = [one for place in range(kept) for one in (first[place], place)]
        back = [one for place in range(kept) for one in (place, second[place])]
        out_ms = self._apply(left=[Leave(number, 0, True)], swaps=SwapCopies(out, []))
        back_ms = self._apply(
            joined=[Join(number, 0, tokens, tokens + 1, list(second), None)],
            chunks=[ChunkPlan(0, tokens, tokens + 1, [])],
            swaps=SwapCopies([], back),
        )
        self._apply(left=[Leave(number, 0, False)])
        return recompute_ms, out_ms, back_ms

    def row(self, tokens: int, rounds: int) -> Row:
        """Return the medians of some rounds, after a warm-up."""
        self.once(tokens)
        found = [self.once(tokens) for _ in range(rounds)]
        medians = [statistics.median(column) for column in zip(*found, strict=True)]
        mib = -(-tokens // BLOCK_SIZE) * BLOCK_SIZE * self._info.kv_bytes_per_token / (1 << 20)
        return Row(tokens, mib, *medians)


def main(words: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.swap", description=__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a step of the prefill")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    options = parser.parse_args(words)
    info = plugin.inspect(options.checkpoint, dtype=options.dtype, item_tokens_max=0)
    bench = Bench(info, longest=max(options.lengths), threads=options.threads, chunk=options.chunk)
    print(
        "| prompt, tokens | KV, MiB | computed again, ms | copied out, ms | back, ms | computing / swapping |"
    )
    print("|---:|---:|---:|---:|---:|---:|")
    rows = []
    for tokens in options.lengths:
        row = bench.row(tokens, options.rounds)
        rows.append(row)
        print(
            f"| {row.tokens:,} | {row.mib:.1f} | {row.recompute_ms:.1f} | {row.out_ms:.2f} | {row.back_ms:.2f} | "
            f"{row.gain:.1f} |"
        )
    return rows


if __name__ == "__main__":
    main()
