"""Families on a device: an end of one process is a result, and results are compared token by token."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.bench.gpu import families
from tests.bench.gpu.families import FAMILIES, OWN, Case, FamilyBench, cases_of, run_all
from tests.bench.gpu.family_rows import FamilyRow
from tests.parity.architectures import FAMILY_SIZES
from tests.patience import NEVER_S

pytest.importorskip("torch")
LOG = """2026 INFO [generate rank 0] vsched_workers.graphs: captured decode steps of up to 8 rows in 0.4 s, 20 MiB
2026 WARNING [generate rank 0] vsched_workers.fused: no fused layer kernels
2026 WARNING [generate rank 0] vsched_workers.fused: no fused layer kernels
"""


def run_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start: Callable[..., None], limit_s: float
) -> FamilyRow:
    """Run a family with another function in its process."""
    bench = FamilyBench(tmp_path, "cpu", limit_s=limit_s, ends_s=math.inf)
    bench._context.set_forkserver_preload([])
    monkeypatch.setattr(families, "start", start)
    return bench.run("llama", "float32", kills=False)


def start_and_die(
    family: str, dtype: str, folder: Path, device: str, log: Path, *, kills: bool
) -> None:
    row = FamilyRow(family=family, dtype=dtype, ready_s=2.0)
    (folder / "row.json").write_bytes(msgspec.json.encode(row))
    log.write_text(LOG)
    os._exit(3)


def hang(*_: object, **__: object) -> None:
    time.sleep(NEVER_S)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_family_is_served_and_compared(tmp_path: Path) -> None:
    """With images and a killed rank, on a CPU."""
    kept = tmp_path / "kept"
    bench = FamilyBench(tmp_path, "cpu", limit_s=NEVER_S, ends_s=math.inf, keep=kept)
    row = bench.run("qwen2_5_vl", "float32", kills=True)
    assert (row.outcome, row.killed, row.error, row.difference) == ("equal", "equal", "", "")
    assert (row.path, row.steps) == ("fused", "eager")
    assert row.right
    assert row.ready_s > 0
    assert (kept / "config.json").exists()


@pytest.mark.slow
def test_a_dead_process_is_a_failed_family(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it had found is kept, with the kind of its steps and each warning once."""
    row = run_here(monkeypatch, tmp_path, start_and_die, NEVER_S)
    assert (row.outcome, row.ready_s, row.steps) == ("failed", 2.0, "captured")
    assert row.error == "the process ended with status 3"
    assert row.warnings == ["vsched_workers.fused: no fused layer kernels"]
    assert not row.right


@pytest.mark.slow
def test_a_hanging_family_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run_here(monkeypatch, tmp_path, hang, 1.0).outcome == "out of time"


def test_each_result_is_written_when_it_is_there() -> None:
    """In the order of the cases, also when a later one ends first; none begins after the time is up."""
    written: list[list[str]] = []
    found = run_all(
        [Case("a", "float32", kills=True), Case("b", "float32", kills=False)],
        lambda case: FamilyRow(family=case.family, dtype=case.dtype),
        lambda rows: written.append([row.family for row in rows]),
        jobs=1,
    )
    assert [row.family for row in found] == ["a", "b"]
    assert written == [["a"], ["a", "b"]]
    late = FamilyBench(Path(), "cpu", limit_s=1.0, ends_s=0.0)
    assert late.run("llama", "float32", kills=False).outcome == "not begun"


def test_families_are_those_of_the_project() -> None:
    assert set(OWN) == set(FAMILY_SIZES)
    assert len(FAMILIES) - len(OWN) >= 8


def test_few_cases_have_every_family_exactly_once_and_killed_ones_first() -> None:
    few = cases_of(FAMILIES, few=True)
    exact = [case for case in few if case.dtype == "float32"]
    assert sorted(case.family for case in exact) == sorted(FAMILIES)
    assert [case.family for case in few if case.dtype != "float32"] == list(OWN)
    killed = [case.kills for case in few]
    assert killed == sorted(killed, reverse=True)
    assert 0 < sum(killed) < len(FAMILIES)
    assert len(cases_of(FAMILIES, few=False)) == 2 * len(FAMILIES)


def test_first_differing_token_is_reported_with_the_gap_of_its_logits() -> None:
    import torch

    from tests.bench.gpu.family_run import compared

    logits = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.5, 0.25]])
    expected = [([1, 1], logits), ([1, 1], logits)]
    assert compared([[1, 1], [1]], expected) == ("equal", "", [])
    told = "request 1 token 1: 2, not 1, 0.25 apart"
    assert compared([[1, 1], [1, 2]], expected) == ("differs", told, [0.25])


@pytest.mark.parametrize(
    ("dtype", "outcome", "killed", "right"),
    [
        ("float32", "equal", "equal", True),
        ("float32", "differs", "", False),
        ("float32", "equal", "differs", False),
        ("bfloat16", "differs", "", True),
        ("bfloat16", "out of time", "", False),
    ],
)
def test_only_rounding_may_change_tokens(
    dtype: str, outcome: str, killed: str, *, right: bool
) -> None:
    row = msgspec.convert(
        {"family": "x", "dtype": dtype, "outcome": outcome, "killed": killed}, FamilyRow
    )
    assert row.right is right
