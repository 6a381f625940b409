"""Rows with various sampling parameters, for tests of samplers on every device; nothing is compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from vsched.types import SamplingParams
from vsched.worker.contract import SequenceState
from vsched_workers.batching.sampling import SpecialRow

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "nucleus": {"top_p": 0.95},
    "tiny nucleus": {"top_p": 1e-9},
    "almost all": {"top_p": 0.999999},
    "top-k": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "larger than the vocabulary": {"top_k": 10**6, "top_p": 0.5},
    "min-p": {"min_p": 0.05},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 1.5},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "rewards": {"frequency_penalty": -1.0, "temperature": 0.0},
    "bias": {"logit_bias": ((3, 9.0), (4, -100.0)), "top_p": 0.9},
    "bad words": {"bad_words": ((7,), (0, 5), (9, 9, 8))},
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.3},
}


def sequence(
    sampling: SamplingParams,
    prompt: list[int],
    outputs: list[int],
    stops: frozenset[int] = frozenset(),
) -> SequenceState:
    tokens = np.zeros(len(prompt) + len(outputs) + 4, dtype=np.int32)
    tokens[: len(prompt) + len(outputs)] = [*prompt, *outputs]
    return SequenceState(
        number=0,
        tokens=tokens,
        length=len(prompt) + len(outputs),
        prompt_length=len(prompt),
        items=[],
        sampling=sampling,
        stop_token_ids=stops,
    )


def special(
    row: int,
    sampling: SamplingParams,
    prompt: list[int] | None = None,
    outputs: list[int] | None = None,
    stops: frozenset[int] = frozenset(),
) -> SpecialRow:
    state = sequence(sampling, prompt or [1], outputs or [], stops)
    return SpecialRow(row=row, position=state.length, sequence=state)
