"""The steps of a run on a GPU: a failing step does not stop the others, and results are on disk."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import pytest

from tests.bench.gpu.steps import Step, StepResult, run_steps
from tests.patience import NEVER_S, wait_until


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


@pytest.mark.slow
def test_processes_left_behind_by_a_step_are_ended(tmp_path: Path) -> None:
    """Its processes would take the memory of the next step."""
    sleeps = "[sys.executable, '-c', 'import time; time.sleep(1e4)']"
    child = f"import subprocess, sys; print(subprocess.Popen({sleeps}).pid)"
    run_steps([python("leaves", child)], tmp_path, seconds=NEVER_S, environment=os.environ)
    pid = int((tmp_path / "leaves.log").read_text())
    wait_until(lambda: not is_running(pid))


@pytest.mark.slow
def test_a_server_of_a_step_whose_time_is_up_is_ended(tmp_path: Path) -> None:
    """Although it has a session of its own and got no signal."""
    server = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1e4)'], start_new_session=True)"
    code = f"import subprocess, sys, time; print({server}.pid, flush=True); time.sleep(1e4)"
    (result,) = run_steps(
        [python("serves", code, 5.0)], tmp_path, seconds=NEVER_S, environment=os.environ
    )
    assert result.ending == "out of time"
    pid = int((tmp_path / "serves.log").read_text())
    wait_until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
