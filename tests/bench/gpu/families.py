"""Small models of many families, each served by a real engine and compared with transformers' `generate`.

`python -m tests.bench.gpu.families --out FOLDER` answers the first questions about a device: does each family start
there, generate the tokens of transformers' own `generate` on the same device, and survive a killed rank? The requests
of a family run at once, with and without images. In float32 the tokens must be equal; in bfloat16 the first different
token is reported, with the gap between the reference's logits of both tokens.

Each family has a process of its own with a time limit, several run side by side, and each result is in `families.json`
as soon as it is there. The exit status is 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import NamedTuple

import msgspec

from tests.bench.gpu.family_rows import FamilyRow, line
from tests.bench.servers import processes

OWN = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
TEXT = (
    *("llama", "qwen3", "mistral", "gemma2", "gpt_oss"),
    *("qwen3_moe", "deepseek_v3", "qwen3_next", "bamba"),
)
"""Decoder-only layers, sliding windows, soft caps, attention sinks; experts, latent attention; states of the gated
delta rule and of Mamba 2."""
IMAGES = ("qwen2_vl", "gemma3", "internvl", "smolvlm")
FAMILIES = (*OWN, *TEXT, *IMAGES)
EXACT, ROUNDED = "float32", "bfloat16"
FEW_KILLED = (*OWN, "gemma2", "qwen3_next", "qwen2_vl")
"""Families with a killed rank if time is short; only the project's own ones run in bfloat16 then."""
LIMIT_S = 60.0
PRELOADED = "tests.bench.gpu.family_run"


class FamilyBench:
    """Runs families in processes of their own."""

    def __init__(
        self, out: Path, device: str, *, limit_s: float, ends_s: float, keep: Path | None = None
    ) -> None:
        """Prepare: `limit_s` is for one family, `ends_s` for all, on the monotonic clock.

        `keep` is a new folder for the checkpoint of the first family.
        """
        self._out = out
        self._device = device
        self._limit_s = limit_s
        self._ends_s = ends_s
        self._keep = keep
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        # Imports take seconds; no process of them has touched the device before the fork.
        self._context.set_forkserver_preload([PRELOADED])
        self._starting = threading.Lock()

    def run(self, family: str, dtype: str, *, kills: bool) -> FamilyRow:
        """Run one family; return its result, whatever happens to its process."""
        row = FamilyRow(family=family, dtype=dtype)
        limit_s = min(self._limit_s, self._ends_s - time.monotonic())
        if limit_s <= 0:
            return row
        log = self._out / f"{family}-{dtype}.log"
        with tempfile.TemporaryDirectory(prefix=f"{family}-") as folder:
            arguments = (family, dtype, Path(folder), self._device, log)
            process = self._context.Process(target=start, args=arguments, kwargs={"kills": kills})
            began_s = time.monotonic()
            with self._starting:
                process.start()
            process.join(limit_s)
            late = process.exitcode is None
            if late:
                kill(process.pid)
                process.join()
            made = Path(folder) / "checkpoint"
            if self._keep is not None and (family, dtype) == (OWN[0], EXACT) and made.exists():
                shutil.copytree(made, self._keep)
            result = Path(folder) / "row.json"
            if result.exists():
                row = msgspec.json.decode(result.read_bytes(), type=FamilyRow)
        row.seconds = round(time.monotonic() - began_s, 1)
        if late or row.outcome == "not begun" or process.exitcode:
            row.outcome = "out of time" if late else "failed"
            row.error = row.error or f"the process ended with status {process.exitcode}"
        row.read_log(log.read_text(errors="replace") if log.exists() else "")
        return row


def start(family: str, dtype: str, folder: Path, device: str, log: Path, *, kills: bool) -> None:
    """Run a family in a process of its own."""
    from tests.bench.gpu.family_run import run_family

    run_family(family, dtype, folder, device, log, kills=kills)


def kill(pid: int | None) -> None:
    """Kill a process and its descendants."""
    assert pid is not None
    for each in processes.family(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


class Case(NamedTuple):
    """A family in a data type; `kills` says whether a rank is killed."""

    family: str
    dtype: str
    kills: bool


def cases_of(families: Sequence[str], *, few: bool) -> list[Case]:
    """Return the cases in the order of their importance.

    In bfloat16 no rank is killed: tokens that are computed again in other batches may differ.
    """
    exact = [Case(each, EXACT, not few or each in FEW_KILLED) for each in families]
    rounded = [Case(each, ROUNDED, kills=False) for each in families if not few or each in OWN]
    return [*sorted(exact, key=lambda case: not case.kills), *rounded]


def run_all(
    cases: Sequence[Case],
    run: Callable[[Case], FamilyRow],
    write: Callable[[list[FamilyRow]], object],
    *,
    jobs: int,
) -> list[FamilyRow]:
    """Run all cases, `jobs` at a time; `write` gets all results in the order of the cases after each."""
    rows: dict[int, FamilyRow] = {}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(run, case): at for at, case in enumerate(cases)}
        for done in concurrent.futures.as_completed(running):
            row = rows[running[done]] = done.result()
            print(line(row), flush=True)
            write([rows[at] for at in sorted(rows)])
    return [rows[at] for at in sorted(rows)]


def main() -> int:
    """Run the families, and write `families.json` and a log of each."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu.families", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--families", default=",".join(FAMILIES), help="names, by commas")
    parser.add_argument("--few", action="store_true", help="fewer killed ranks and data types")
    parser.add_argument("--keep", type=Path, help=f"new folder for the checkpoint of {OWN[0]}")
    parser.add_argument("--jobs", type=int, default=0, help="processes side by side")
    parser.add_argument("--seconds", type=float, default=0, help="for all together; 0 for no limit")
    options = parser.parse_args()
    out: Path = options.out.absolute()
    logs = out / "families"
    logs.mkdir(parents=True, exist_ok=True)
    limit_s = LIMIT_S * (10 if options.device == "cpu" else 1)
    ends_s = time.monotonic() + (options.seconds or 1e9)
    bench = FamilyBench(logs, options.device, limit_s=limit_s, ends_s=ends_s, keep=options.keep)
    rows = run_all(
        cases_of(options.families.split(","), few=options.few),
        lambda case: bench.run(case.family, case.dtype, kills=case.kills),
        lambda found: (out / "families.json").write_bytes(msgspec.json.encode(found)),
        # A case keeps about one core busy: its own process, or its rank, which imports and compiles.
        jobs=options.jobs or len(os.sched_getaffinity(0)),
    )
    return int(not all(row.right for row in rows))


if __name__ == "__main__":
    sys.exit(main())
