"""Samplers of other servers: their inputs, the check of their tokens, and their figures."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from tests.bench.parts.sampler.measure import draw_logits
from tests.bench.samplers import table
from tests.bench.samplers.job import OUTPUTS, PROMPT, Choose, Logits, check, measure
from tests.bench.servers.sides import ROOT
from vsched.types import SamplingParams

LOGITS = np.array([[1.0, 5.0, 3.0], [9.0, 2.0, 8.0]], np.float32)


def tokens(*ids: int) -> npt.NDArray[np.int32]:
    return np.array(ids, np.int32)


def test_peers_get_the_requests_of_vsched() -> None:
    for fields in table.CASES.values():
        SamplingParams(seed=0, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "wrong"), [({"temperature": 0.0}, tokens(1, 2)), ({"top_k": 2}, tokens(0, 0))]
)
def test_a_sampler_that_chooses_what_it_may_not_is_not_measured(
    fields: Mapping[str, float], wrong: npt.NDArray[np.int32]
) -> None:
    check(LOGITS, fields, tokens(1, 0))
    with pytest.raises(ValueError, match="greatest"):
        check(LOGITS, fields, wrong)
    with pytest.raises(ValueError, match="1 tokens for 2 rows"):
        check(LOGITS, fields, tokens(1))
    check(LOGITS, {**fields, "repetition_penalty": 1.1}, wrong)


def test_peers_take_their_cases_in_turns() -> None:
    requested: list[str] = []
    shapes: list[tuple[int, ...]] = []

    def make(logits: Logits, fields: Mapping[str, float], history: npt.NDArray[np.int32]) -> Choose:
        shapes.append(history.shape)
        name = next(name for name, one in table.CASES.items() if one is fields)

        def choose() -> npt.NDArray[np.int32]:
            requested.append(name)
            return tokens(*logits.argmax(axis=1).tolist())

        return choose

    found = measure(make, draw_logits("flat", 2, 50), table.CASES, 2, "flat", 2)
    assert requested == list(table.CASES) * 3, "the first round is not counted"
    assert set(shapes) == {(2, PROMPT + OUTPUTS)}
    rows = table.read(json.dumps({"rows": found}).encode())
    assert [row.requested for row in rows] == list(table.CASES)
    assert all(row.spread_ms[0] <= row.step_ms <= row.spread_ms[1] for row in rows)


def test_the_job_of_peers_has_all_logits(tmp_path: Path) -> None:
    job = json.loads(msgspec.json.encode(table.write_job(tmp_path, 50, 3)))
    found = {(kind, rows): np.load(file).shape for kind, rows, file in job["logits"]}
    assert found == {
        (kind, rows): (rows, 50) for kind in ("trained", "flat") for rows in (1, 8, 64)
    }
    assert job["cases"] == table.CASES


def test_scripts_of_peers_import_only_their_packages_and_numpy() -> None:
    """Nothing of vsched is in their environments."""
    code = "import sys, tests.bench.samplers.job; print([n for n in sys.modules if 'vsched' in n])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
