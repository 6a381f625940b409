"""`deterministic` on several ranks: a request's logits are bit-identical in any batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.workers import driver
from tests.workers.driver import Question, Stage, drawn_image, reported
from tests.workers.parallel.ranks import Ranks, driver_of, make_four_heads
from vsched.types import SamplingParams
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.cpu.kernels.simd import has_bf16_dot

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not has_bf16_dot(), reason="needs avx512_bf16")]

SAMPLING = SamplingParams(temperature=0.0, logprobs=4)
QUESTIONS = [
    Question("What is in the image?", [drawn_image(1, 90, 60)], sampling=SAMPLING),
    Question("Why? " * 9, sampling=SAMPLING),
    *(Question(f"{n}? " * n, count=6, sampling=SAMPLING) for n in range(1, 6)),
]


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_four_heads(tmp_path_factory.mktemp("four") / "heads", "nano3", "bfloat16")


def answers(
    settings: WorkerSettings, path: str, runs: Sequence[tuple[int, int, int]]
) -> list[list[tuple[list[int], str]]]:
    """Return the log-probabilities of the first `count` questions, for runs of (count, chunk size, preempts)."""
    settings = dataclasses.replace(settings, deterministic=True)
    found = []
    # The process is reused by other tests.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "BLOCK_SIZE", 16)
        stage = Stage.load(path, attention="auto", dtype="bfloat16", settings=settings)
        for count, chunk, preempts in runs:
            one = driver_of(settings, stage, chunk)
            running = one.run(QUESTIONS[:count], arrivals=min(preempts, 1), preempts=preempts)
            assert all(len(each.logprobs) == len(each.output) for each in running)
            found.append(reported(running))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_logits_are_the_same_over_ranks(ranks: Ranks, four_heads: Path, size: int) -> None:
    """Alone and in a batch, with other chunk sizes, and recomputed; all digits of log-probabilities are compared."""
    runs = [(1, 1000, 0), (len(QUESTIONS), 40, 0), (len(QUESTIONS), 13, 4)]
    for alone, together, again in ranks.run(answers, str(four_heads), runs, size=size):
        assert together[:1] == alone
        assert again == together
