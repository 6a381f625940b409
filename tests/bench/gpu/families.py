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
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

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
DTYPES = ("float32", "bfloat16")
LIMIT_S = 60.0
PRELOADED = "tests.bench.gpu.family_run"


class FamilyBench:
    """Runs families in processes of their own."""

    def __init__(self, out: Path, device: str, *, limit_s: float, ends_s: float) -> None:
        """Prepare: `limit_s` is for one family, `ends_s` for all, on the monotonic clock."""
        self._out = out
        self._device = device
        self._limit_s = limit_s
        self._ends_s = ends_s
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        # Imports take seconds; no process of them has touched the device before the fork.
        self._context.set_forkserver_preload([PRELOADED])
        self._starting = threading.Lock()

    def run(self, family: str, dtype: str) -> FamilyRow:
        """Run one family; return its result, whatever happens to its process."""
        row = FamilyRow(family=family, dtype=dtype)
        limit_s = min(self._limit_s, self._ends_s - time.monotonic())
        if limit_s <= 0:
            return row
        log = self._out / f"{family}-{dtype}.log"
        with tempfile.TemporaryDirectory(prefix=f"{family}-") as folder:
            arguments = (family, dtype, Path(folder), self._device, log)
            process = self._context.Process(target=start, args=arguments)
            began_s = time.monotonic()
            with self._starting:
                process.start()
            process.join(limit_s)
            late = process.exitcode is None
            if late:
                kill(process.pid)
                process.join()
            result = Path(folder) / "row.json"
            if result.exists():
                row = msgspec.json.decode(result.read_bytes(), type=FamilyRow)
        row.seconds = round(time.monotonic() - began_s, 1)
        if late or row.outcome == "not begun" or process.exitcode:
            row.outcome = "out of time" if late else "failed"
            row.error = row.error or f"the process ended with status {process.exitcode}"
        row.read_log(log.read_text(errors="replace") if log.exists() else "")
        return row


def start(family: str, dtype: str, folder: Path, device: str, log: Path) -> None:
    """Run a family in a process of its own."""
    from tests.bench.gpu.family_run import run_family

    run_family(family, dtype, folder, device, log)


def kill(pid: int | None) -> None:
    """Kill a process and its descendants."""
    assert pid is not None
    for each in processes.family(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def run_all(
    cases: Sequence[tuple[str, str]],
    run: Callable[[str, str], FamilyRow],
    write: Callable[[list[FamilyRow]], object],
    *,
    jobs: int,
) -> list[FamilyRow]:
    """Run all cases, `jobs` at a time; `write` gets all results in the order of the cases after each."""
    rows: dict[tuple[str, str], FamilyRow] = {}
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for done in concurrent.futures.as_completed([pool.submit(run, *case) for case in cases]):
            row = done.result()
            rows[row.family, row.dtype] = row
            print(line(row), flush=True)
            write([rows[case] for case in cases if case in rows])
    return [rows[case] for case in cases]


def main() -> int:
    """Run the families, and write `families.json` and a log of each."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu.families", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--families", default=",".join(FAMILIES), help="names, by commas")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--jobs", type=int, default=0, help="processes side by side")
    parser.add_argument("--seconds", type=float, default=0, help="for all together; 0 for no limit")
    options = parser.parse_args()
    out: Path = options.out.absolute()
    logs = out / "families"
    logs.mkdir(parents=True, exist_ok=True)
    on_cpu = options.device == "cpu"
    ends_s = time.monotonic() + (options.seconds or 1e9)
    bench = FamilyBench(
        logs, options.device, limit_s=LIMIT_S * (10 if on_cpu else 1), ends_s=ends_s
    )
    cases = [
        (family, dtype)
        for dtype in options.dtypes.split(",")
        for family in options.families.split(",")
    ]
    # A case is mostly one busy process: its own while it compares, its rank while it starts.
    cores = len(os.sched_getaffinity(0))
    rows = run_all(
        cases,
        bench.run,
        lambda found: (out / "families.json").write_bytes(msgspec.json.encode(found)),
        jobs=options.jobs or max(1, cores * 3 // 4),
    )
    return int(not all(row.right for row in rows))


if __name__ == "__main__":
    sys.exit(main())
