"""Results are the same to the bit with any number of threads, and whatever uninitialized memory holds."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.workers import driver
from tests.workers.backends.cpu.kernels.operands import needs_bf16_dot
from tests.workers.driver import Checkpoints, Driver, Question, Stage, drawn_image, reported
from vsched.types import SamplingParams
from vsched_workers.backends.cpu import language_layers
from vsched_workers.backends.cpu.threads import process_pool

pytest.importorskip("numba")

load = functools.partial(Stage.load, attention="auto", dtype="bfloat16")

QUESTIONS = [
    Question(
        text,
        [drawn_image(seed, 60 + 30 * seed, 80) for seed in range(images)],
        count=9,
        sampling=SamplingParams(temperature=1.0, seed=number, top_p=0.95, logprobs=3),
    )
    for number, (text, images) in enumerate(
        [("What is it?", 1), ("Why? " * 9, 0), ("a", 2), ("Compare these, please.", 0)]
    )
]


class PoisonedDriver(Driver):
    """Fills the free memory of the heap with NaN before every step: compiled kernels allocate their buffers there."""

    def step(self, active: Any) -> None:
        poison_heap()
        super().step(active)


def poison_heap() -> None:
    """Fill blocks of many sizes with NaN in bfloat16, float32 and float64, and free them."""
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    pieces = []
    for size in [*range(24, 1048, 16), *(1 << power for power in range(11, 17))] * 8:
        pieces.append(library.malloc(size))
        ctypes.memset(pieces[-1], 0xFF, size)
    for piece in pieces:
        library.free(piece)


@contextmanager
def poisoned_tensors() -> Iterator[None]:
    """Fill torch's allocations with NaN; this also fixes the order of its sums, on a CPU without a change."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@needs_bf16_dot
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "block_size", "threads", "deterministic"),
    [("tiny25", 16, 2, False), ("tiny25", 16, 2, True), ("nano3", 4, 1, False)],
)
def test_outputs_do_not_depend_on_unwritten_memory(
    checkpoints: Checkpoints,
    name: str,
    block_size: int,
    threads: int,
    deterministic: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither KV blocks nor buffers, in chunks of any size, with the kernels of every path."""
    monkeypatch.setattr(driver, "BLOCK_SIZE", block_size)
    # Attention runs on all threads for any number of values.
    monkeypatch.setattr(language_layers, "DECODE_VALUES_MIN", 0)
    stage = load(checkpoints(name), threads=threads, deterministic=deterministic)
    for chunk in (17, 64):
        wanted = reported(Driver(stage, chunk=chunk).run(QUESTIONS, arrivals=2))
        generator: Any = stage.generator
        with poisoned_tensors():
            generator.build_kv(blocks=driver.BLOCKS, block_size=block_size)
            for cached in (*generator._cache.keys, *generator._cache.values):
                cached.fill_(torch.nan)
            found = reported(PoisonedDriver(stage, chunk=chunk).run(QUESTIONS, arrivals=2))
        assert found == wanted


class ChangingDriver(Driver):
    """Computes each step with another number of threads."""

    _numbers = itertools.cycle([1, 3, 2])

    def step(self, active: Any) -> None:
        process_pool().use(next(self._numbers))
        super().step(active)


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=needs_bf16_dot)])
def test_answers_have_the_same_bits_with_any_number_of_threads(
    checkpoints: Checkpoints, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, their log-probabilities and images, in chunks and in compiled steps."""
    monkeypatch.setattr(driver, "BLOCK_SIZE", 16)
    monkeypatch.setattr(language_layers, "DECODE_VALUES_MIN", 0)
    stage = load(checkpoints("tiny25"), threads=3, deterministic=deterministic)
    process_pool().use(1)
    wanted = reported(Driver(stage, chunk=64).run(QUESTIONS, arrivals=2))
    process_pool().use(3)
    assert reported(Driver(stage, chunk=64).run(QUESTIONS, arrivals=2)) == wanted
    assert reported(ChangingDriver(stage, chunk=64).run(QUESTIONS, arrivals=2)) == wanted
    process_pool().use(1)
