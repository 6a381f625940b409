"""Sampling cost: a worker's sampler over random logits, by itself, alternating with greedy sampling.

There are two kinds of logits, because the cost of top-p depends on the number of tokens it keeps.
Those of a trained model concentrate the mass on some tens of tokens; flat ones spread it over tens
of thousands, the worst case.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.types import SamplingParams
from vsched.worker.contract import SequenceState

ASKED: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 20, top-p 0.8": {"top_k": 20, "top_p": 0.8},
    "min-p 0.05": {"min_p": 0.05},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    "all": {
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": ((3, 1.0),),
    },
}
"""Sampling parameters by row name; temperature 1 by default."""

KINDS = ("trained", "flat")
_PROMPT, _OUTPUTS = 400, 100
_LIKELY = 40

Choose = Callable[[Sequence[tuple[int, SequenceState]]], npt.NDArray[np.int32]]
MakeSampler = Callable[[npt.NDArray[np.float32]], Choose]


class SamplerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One case; milliseconds of CPU time per step, the median of all repeats, the minimum and the maximum."""

    logits: str
    rows: int
    requested: str
    step_ms: float
    spread_ms: tuple[float, float]


def draw_logits(kind: str, rows: int, vocabulary: int, *, seed: int = 0) -> npt.NDArray[np.float32]:
    """Return logits [rows, vocabulary] of one of `KINDS`."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((rows, vocabulary), np.float32) * np.float32(2.0)
    if kind == "trained":
        count = min(_LIKELY, vocabulary)
        for row in logits:
            row[rng.choice(vocabulary, count, replace=False)] = np.linspace(20.0, 10.0, count)
    return logits


def measure_sampler(
    make: MakeSampler,
    *,
    vocabulary: int,
    rows: Sequence[int],
    repeats: int,
    cases: Mapping[str, Mapping[str, Any]] = ASKED,
) -> list[SamplerRow]:
    """Measure every case; in each repeat the cases of one number of rows take turns."""
    found: list[SamplerRow] = []
    for kind in KINDS:
        for count in rows:
            choose = make(draw_logits(kind, count, vocabulary))
            requested = {
                name: _special(fields, count, vocabulary) for name, fields in cases.items()
            }
            spent: dict[str, list[float]] = {name: [] for name in requested}
            for repeat in range(repeats + 1):
                for name, special in requested.items():
                    began_ns = time.process_time_ns()
                    choose(special)
                    if repeat > 0:  # the first one fills caches
                        spent[name].append((time.process_time_ns() - began_ns) / 1e6)
            found += [
                SamplerRow(
                    logits=kind,
                    rows=count,
                    requested=name,
                    step_ms=statistics.median(times),
                    spread_ms=(min(times), max(times)),
                )
                for name, times in spent.items()
            ]
    return found


def _special(
    fields: Mapping[str, Any], count: int, vocabulary: int
) -> list[tuple[int, SequenceState]]:
    """Return the rows that need more than the argmax, as a rank passes them."""
    rng = np.random.default_rng(1)
    special: list[tuple[int, SequenceState]] = []
    for row in range(count):
        params = SamplingParams(seed=row, **fields)
        tokens = rng.integers(0, vocabulary, _PROMPT + _OUTPUTS, dtype=np.int32)
        state = SequenceState(
            number=row,
            tokens=tokens,
            length=len(tokens),
            prompt_length=_PROMPT,
            items=(),
            sampling=params,
            stop_token_ids=frozenset(),
        )
        if state.is_special:
            special.append((row, state))
    return special
