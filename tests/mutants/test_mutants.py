"""The mutation of functions, and trials against tests: killed, surviving and hanging mutants."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.mutate import file_of, mutants_of, watch
from tests.mutants.places import CHECKS, PLACES
from tests.mutants.report import differences, table
from tests.mutants.trial import Verdict
from vsched.probes import probe

ROOT = Path(__file__).parents[2]
HERE = "tests.mutants.test_mutants"
PLACE = f"{HERE}:countdown"


def countdown(start: int, *, limit: int = 0) -> list[int]:
    """Return the numbers from `start` down to, but not including, `limit`."""
    if start > 100:
        probe("nobody.knows")
    found = []
    while start > limit:
        found.append(start)
        start -= 1
    return found


def test_mutants_change_one_thing_each_and_leave_probes_alone() -> None:
    changes = [(one.before, one.after) for one in mutants_of(PLACE)]
    assert changes == [
        ("0", "1"),
        ("found = []", "pass"),
        ("while start > limit:", "while not start > limit:"),
        ("start > limit", "start >= limit"),
        ("found.append(start)", "pass"),
        ("start -= 1", "pass"),
        ("1", "2"),
        ("return found", "pass"),
    ]


def test_mutants_have_keys_of_their_own() -> None:
    mutants = [one for place in PLACES for one in mutants_of(place)]
    assert len({one.key for one in mutants}) == len(mutants)
    assert {one.key for one in mutants} >= EQUIVALENT.keys(), "an entry of a mutant that is gone"


def test_mutants_meet_tests_that_are_there() -> None:
    assert [path for path in CHECKS if not (ROOT / path).exists()] == []


def test_watch_tells_which_statements_run() -> None:
    first = countdown.__code__.co_firstlineno
    before = countdown.__code__
    try:
        reached = watch((PLACE,))
        assert countdown(2) == [2, 1]
        lines = sorted(line - first for place, line in reached if place == PLACE)
    finally:
        countdown.__code__ = before
    assert lines == [0, 1, 2, 4, 5, 6, 7, 8]


def test_report_counts_by_file_and_shows_survivors_as_differences() -> None:
    mutants = mutants_of(PLACE)[:3]
    verdicts = {
        one.key: Verdict(outcome, "", 1)
        for one, outcome in zip(mutants, ("killed", "timeout", "survived"), strict=True)
    }
    row = table(mutants, verdicts).splitlines()[2]
    assert row == f"| `{file_of(PLACE)}` | 3 | 2 | 1 | 0 | 1 |"
    assert differences(mutants[2:]).endswith(
        " countdown #1\n- while start > limit:\n+ while not start > limit:"
    )


WEAK_TESTS = """
from tests.mutants.test_mutants import countdown


def test_weak() -> None:
    assert 2 in countdown(2)
"""

TRY = f"""
import sys
from tests.mutants.mutate import mutants_of
from tests.mutants.trial import Trials, with_tests

PLACE = {PLACE!r}


def work(items):
    trials = Trials(items, (PLACE,))
    trials.learn(lambda: None)
    for mutant in mutants_of(PLACE):
        verdict = trials.judge(mutant)
        said.append(f"{{verdict.outcome}} {{verdict.tests}} {{mutant.before}}")


said = []
with_tests(sys.argv[1:], work)
print(*said, sep="\\n")
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_trial_tells_what_is_killed_what_hangs_and_what_survives(tmp_path: Path) -> None:
    """An endless loop ends at its time limit, one that allocates also at its memory limit."""
    path = tmp_path / "test_weak.py"
    path.write_text(WEAK_TESTS)
    said = run("-c", TRY, str(path)).stdout.splitlines()
    assert said == [
        "survived 1 0",
        "killed 1 found = []",
        "killed 1 while start > limit:",
        "survived 1 start > limit",
        "killed 1 found.append(start)",
        "timeout 1 start -= 1",
        "survived 1 1",
        "killed 1 return found",
    ]


@pytest.mark.slow
def test_trial_refuses_tests_that_fail_with_nothing_changed(tmp_path: Path) -> None:
    path = tmp_path / "test_wrong.py"
    path.write_text("def test_wrong() -> None:\n    assert False\n")
    assert "fails with nothing changed: " in run("-c", TRY, str(path)).stderr


@pytest.mark.slow
def test_command_finds_that_a_loss_is_handled_in_full(tmp_path: Path) -> None:
    """Requests that settle when their group is lost, and claims of those that ran there: each was once missed."""
    results = tmp_path / "results.jsonl"
    ended = run(
        *("-m", "tests.mutants", "_suspend", "GenerateGroup.lose", "take_requeueable"),
        *("--checks", "tests/unit/kernel/generate/test_in_flight.py", "--results", str(results)),
    )
    assert ended.returncode in (0, 1), ended.stderr
    killed = [line for line in results.read_text().splitlines() if '"killed"' in line]
    for change in (
        "RequestMoves._suspend: self.drop_claims(state) -> pass #1",
        "GenerateGroup.lose: True -> False #1",
        "take_requeueable: crashed or last_step <= self.done -> False or last_step <= self.done #1",
    ):
        assert [line for line in killed if change in line], f"not killed: {change}"
