"""The steps of a run on a GPU: a failing step does not stop the others, and results are on disk."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import pytest

from tests.bench.gpu.steps import Step, StepResult, run_steps
from tests.patience import NEVER_S, wait_until
from tests.traces import is_alive


def python(name: str, code: str, limit_s: float = NEVER_S) -> Step:
    return Step(name, [sys.executable, "-c", code], limit_s)


def written(folder: Path) -> list[StepResult]:
    return msgspec.json.decode((folder / "steps.json").read_bytes(), type=list[StepResult])


@pytest.mark.slow
def test_a_step_that_fails_or_hangs_does_not_end_the_rest(tmp_path: Path) -> None:
    """Nor does one that ignores its timeout, or that cannot be started."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1e4)"
    steps = [
        python("fails", "print('a reason'); raise SystemExit(3)"),
        python("hangs", "import time; time.sleep(1e4)", 0.1),
        python("deaf", deaf, 3.0),
        Step("missing", ["/nowhere/at/all"], NEVER_S),
        python("works", "print('done')"),
    ]
    results = run_steps(steps, tmp_path, seconds=NEVER_S, environment=os.environ)
    endings = ["failed", "out of time", "out of time", "failed", "done"]
    assert [each.ending for each in results] == endings
    assert results[0].status == 3
    assert written(tmp_path) == results
    assert (tmp_path / "fails.log").read_text() == "a reason\n"
    assert "/nowhere/at/all" in (tmp_path / "missing.log").read_text()


def test_delivered_tokens_are_on_disk_before_the_next_step(tmp_path: Path) -> None:
    read = f"import pathlib; print(pathlib.Path({str(tmp_path / 'steps.json')!r}).read_text())"
    run_steps(
        [python("first", "pass"), python("second", read)],
        tmp_path,
        seconds=NEVER_S,
        environment=os.environ,
    )
    assert '"first"' in (tmp_path / "second.log").read_text()


def test_no_step_begins_when_the_time_is_up(tmp_path: Path) -> None:
    results = run_steps([python("late", "pass")], tmp_path, seconds=0, environment={})
    assert [each.ending for each in results] == ["not begun"]
    assert written(tmp_path) == results


SLEEPS = "[sys.executable, '-c', 'import time; time.sleep(1e4)']"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "limit_s", "ending"),
    [
        (f"print(subprocess.Popen({SLEEPS}).pid)", NEVER_S, "done"),
        (
            f"print(subprocess.Popen({SLEEPS}, start_new_session=True).pid, flush=True); time.sleep(1e4)",
            5.0,
            "out of time",
        ),
    ],
    ids=["left behind", "in a session of its own, when the time is up"],
)
def test_processes_of_a_step_are_ended(
    tmp_path: Path, code: str, limit_s: float, ending: str
) -> None:
    """They would take the memory of the next step."""
    step = python("leaves", f"import subprocess, sys, time; {code}", limit_s)
    (result,) = run_steps([step], tmp_path, seconds=NEVER_S, environment=os.environ)
    assert result.ending == ending
    pid = int((tmp_path / "leaves.log").read_text())
    wait_until(lambda: not is_alive(pid))
