"""Responses of a model while the number of computing threads changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba")

from tests.workers import driver
from tests.workers.backends.cpu.test_poisoned_memory import QUESTIONS, answers
from tests.workers.driver import Driver, Stage
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.cpu import language_layers
from vsched_workers.backends.cpu.threads import process_pool


class ChangingDriver(Driver):
    """Computes each step with another number of threads."""

    _numbers = itertools.cycle([1, 3, 2])

    def step(self, active: Any) -> None:
        process_pool().use(next(self._numbers))
        super().step(active)


@pytest.mark.parametrize("deterministic", [False, True])
def test_answers_have_the_same_bits_with_any_number_of_threads(
    checkpoints: Callable[[str], Path], deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, their log-probabilities and images, in chunks and in compiled steps."""
    monkeypatch.setattr(driver, "BLOCK_SIZE", 16)
    monkeypatch.setattr(language_layers, "DECODE_VALUES_MIN", 0)
    settings = WorkerSettings(threads=3, deterministic=deterministic)
    stage = Stage.load(
        str(checkpoints("tiny25")), attention="auto", dtype="bfloat16", settings=settings
    )
    process_pool().use(1)
    wanted = answers(Driver(stage, chunk=64).run(QUESTIONS, arrivals=2))
    for number in (2, 3):
        process_pool().use(number)
        assert answers(Driver(stage, chunk=64).run(QUESTIONS, arrivals=2)) == wanted
    assert answers(ChangingDriver(stage, chunk=64).run(QUESTIONS, arrivals=2)) == wanted
    process_pool().use(1)
