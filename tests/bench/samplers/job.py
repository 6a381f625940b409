"""Job of a peer's sampler and its timing; depends on numpy alone, because it runs in the peer's environment.

A job is a JSON file: `repeats`, `cases` (request fields by name), `library` (if one must be
loaded), and `logits`: for each measurement its kind, its rows, and the file of float32 logits
[rows, vocabulary].
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PROMPT, OUTPUTS = 400, 100
TOLERANCE = 1 / 64
"""In logits; more than the rounding error of bfloat16."""

Fields = Mapping[str, float]
Logits = npt.NDArray[np.float32]
Choose = Callable[[], npt.NDArray[np.int32]]
Make = Callable[[Logits, Fields, npt.NDArray[np.int32]], Choose]


def run(make: Callable[[dict[str, Any]], Make]) -> None:
    """Run the measurement given by the program's arguments: a job, and the output file."""
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    rows = [
        row
        for kind, count, file in job["logits"]
        for row in measure(make(job), np.load(file), job["cases"], job["repeats"], kind, count)
    ]
    Path(sys.argv[2]).write_text(json.dumps({"rows": rows}))


def measure(
    make: Make,
    logits: Logits,
    cases: Mapping[str, Fields],
    repeats: int,
    kind: str,
    count: int,
) -> list[dict[str, Any]]:
    """Return milliseconds of CPU time per step of every case: median, minimum and maximum; cases take turns.

    Raises:
        ValueError: When the sampler chooses a token that the request does not allow.
    """
    history = np.random.default_rng(1).integers(
        0, logits.shape[1], (count, PROMPT + OUTPUTS), dtype=np.int32
    )
    chosen = {name: make(logits, fields, history) for name, fields in cases.items()}
    spent: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(repeats + 1):
        for name, choose in chosen.items():
            began_ns = time.process_time_ns()
            tokens = choose()
            took_ms = (time.process_time_ns() - began_ns) / 1e6
            check(logits, cases[name], tokens)
            if repeat > 0:  # the first one fills caches
                spent[name].append(took_ms)
    return [
        {
            "logits": kind,
            "rows": count,
            "requested": name,
            "step_ms": statistics.median(times),
            "spread_ms": [min(times), max(times)],
        }
        for name, times in spent.items()
    ]


def check(logits: Logits, fields: Fields, tokens: npt.NDArray[np.int32]) -> None:
    """Refuse tokens beyond top-k, or other than the greedy one; not checked with penalties, which change the order."""
    most = 1 if fields.get("temperature") == 0 else int(fields.get("top_k", 0))
    if len(tokens) != len(logits):
        raise ValueError(f"{len(tokens)} tokens for {len(logits)} rows")
    if not most or "repetition_penalty" in fields:
        return
    least = np.partition(logits, -most, axis=1)[:, -most]
    found = logits[np.arange(len(logits)), tokens]
    if (found < least - np.abs(least) * TOLERANCE).any():
        raise ValueError(f"a token is not among the {most} greatest")
