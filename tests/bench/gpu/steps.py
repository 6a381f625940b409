"""Runs commands one after another, each with a time limit, and records the result of each.

GPU time is limited to minutes: a step that fails or hangs must not take the time of others, and
earlier results must be on disk, in few files: a lent machine may return no more than eight.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from tests.bench.servers import processes

END_S = 5.0
"""Maximum time for a command to end after SIGINT, on which pytest writes its report."""

START_S_MIN = 5.0
"""Minimum remaining time to start a step."""

LOG = "steps.log"
"""Output of all steps and their servers, with a heading `== NAME ==` for each step."""

Ending = Literal["done", "failed", "out of time", "not begun"]


@dataclass(frozen=True)
class Step:
    """A command and its time limit, which is well above its usual duration."""

    name: str
    command: Sequence[str]
    limit_s: float


class StepResult(msgspec.Struct, frozen=True):
    """Result and duration of a step."""

    name: str
    ending: Ending
    status: int
    seconds: float


def run_steps(
    steps: Sequence[Step], folder: Path, *, seconds: float, environment: Mapping[str, str]
) -> list[StepResult]:
    """Run the steps in order within `seconds`; write `steps.json` after each, and their output to `LOG`.

    Blocks: for `seconds`, plus a few more to end running commands.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ends_s = time.monotonic() + seconds
    results: list[StepResult] = []
    for step in steps:
        left_s = ends_s - time.monotonic()
        if left_s < START_S_MIN:
            result = StepResult(step.name, "not begun", 0, 0.0)
        else:
            result = _run(step, folder, min(step.limit_s, left_s), environment)
        results.append(result)
        print(f"{step.name}: {result.ending} after {result.seconds:.0f} s", flush=True)
        encoded = msgspec.json.format(msgspec.json.encode(results), indent=1)
        (folder / "steps.json").write_bytes(encoded)
    return results


def _run(step: Step, folder: Path, limit_s: float, environment: Mapping[str, str]) -> StepResult:
    began_s = time.monotonic()
    with (folder / LOG).open("ab", buffering=0) as log:
        log.write(f"== {step.name} ==\n".encode())
        try:
            process = subprocess.Popen(
                step.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            log.write(f"{error}\n".encode())
            return StepResult(step.name, "failed", 127, 0.0)
        try:
            status = process.wait(limit_s)
            ending: Ending = "failed" if status else "done"
        except subprocess.TimeoutExpired:
            status = processes.end(process, END_S, by=signal.SIGINT)
            ending = "out of time"
        finally:  # a leftover process would take memory from the next step
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return StepResult(step.name, ending, status, round(time.monotonic() - began_s, 1))
