"""The page of results from a GPU: all of them, and those available when the run was cut short."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.bench.gpu.family_rows import FamilyRow
from tests.bench.gpu.page import PAGE, KvTry, LedgerCheck, Machine, page, replaced
from tests.bench.gpu.serve import ledger_check
from tests.bench.gpu.steps import StepResult
from tests.bench.gpu.tables import Figures, Row

GIB = 1 << 30
TESTS = '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2"/></testsuites>'


def write(path: Path, value: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(msgspec.json.encode(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "machine.json", Machine("H100, 580.1, 81559 MiB", {"torch": "2.11.0"}, "abc1"))
    write(tmp_path / "steps.json", [StepResult("tests", "out of time", -15, 170.2)])
    (tmp_path / "tests.xml").write_text(TESTS)
    gone = FamilyRow(family="bamba", dtype="float32", outcome="failed", error="ValueError: a | b")
    right = FamilyRow(family="llama", dtype="float32", path="fused", ready_s=9.04, outcome="equal",
                      killed="equal", steps="captured")  # fmt: skip
    rounded = msgspec.structs.replace(right, dtype="bfloat16", outcome="differs", killed="",
                                      gaps=[0.5, 0.0312])  # fmt: skip
    write(tmp_path / "families.json", [right, gone, rounded])
    rows = [
        Row("3b", "decode 1 x 1024", 3.0, 2.0, {"eager_ms": 9.0, "moved": 6.7e9, "operations": 1e9}),
        Row("3b", "conversation 2K turn 8", 50.0, None, {
            "encode_all_ms": 400.0, "first_token_all_ms": 900.0,
            "first_token_embeddings_ms": 550.0, "first_token_prefix_ms": 90.0}),
    ]  # fmt: skip
    figures = Figures(device="H100", torch="2.11.0", bandwidth=2.5e12, rate=6e14, rows=rows)
    write(tmp_path / "3b/gpu.json", figures)
    tries = [KvTry('{use="auto-profile"}', 9700, 20.0, ""), KvTry("a", 10000, 9.0, "")]
    write(tmp_path / "kv.json", [*tries, KvTry("b", 0, 5.0, "too large")])
    write(
        tmp_path / "ledger.json", LedgerCheck({"kv": 60 * GIB, "arena": 0}, GIB, 70 * GIB, 71 * GIB)
    )
    return tmp_path


def test_page_reports_what_came_back(folder: Path) -> None:
    made = page(folder)
    for expected in (
        "H100, 580.1, 81559 MiB; torch 2.11.0; commit abc1.",
        "| tests | out of time | 170 |",
        "1 of 2 equal in float32, 0 of 1 equal in bfloat16.",
        "| `llama` | fused | captured | equal | 2 differ, logits 0.031 to 0.5 apart | equal | 9.0, 9.0 |  |",
        "| `bamba` |  |  | failed |  |  |  | ValueError: a \\| b |",
        "Tests: 5 passed, 2 failed, 2 skipped.",
        "| decode 1 x 1024 | 3.00 | 2.00 | 0.67 | 9.00 | 2.00 | 1.40 |",
        "| 2K turn 8 | 400.0 | 50.0 | 8.0 | 900.0 | 550.0 | 90.0 |",
        "9,700 tokens in a start of 20 s, 3.0 % below the largest of 2 others",
        "| kv | 60.00 |",
        "1.00 before the start, 70.00 ready, 71.00 after the load",
    ):
        assert expected in made
    assert "arena" not in made


def test_page_reports_what_there_is_of_a_run_that_was_cut_short(tmp_path: Path) -> None:
    assert page(tmp_path) == "Nothing has been measured on a GPU yet.\n"
    write(tmp_path / "machine.json", Machine("H100", {"torch": "2.11.0"}, "abc1"))
    assert page(tmp_path).startswith("H100; torch 2.11.0; commit abc1.\n")


def test_page_has_one_place_in_the_benchmarks(folder: Path) -> None:
    """Results of an earlier run are removed."""
    once = replaced(PAGE.read_text(), page(folder))
    twice = replaced(once, "Other figures.\n")
    assert "70.00 ready" in once
    assert "70.00 ready" not in twice
    assert twice == replaced(PAGE.read_text(), "Other figures.\n")
    with pytest.raises(ValueError, match="lacks"):
        replaced("<!-- gpu: begin --> and no more", "")


def test_ledger_is_compared_for_the_device_alone() -> None:
    twice = [{"line": "kv", "bytes": 5}, {"line": "kv", "bytes": 2}]
    host = [{"line": "arena", "bytes": 9}]
    ledger = {"pools": [{"pool": "cuda:GPU-1", "lines": twice}, {"pool": "cpu", "lines": host}]}
    assert ledger_check(ledger, before=1, ready=2, loaded=3) == LedgerCheck({"kv": 7}, 1, 2, 3)
