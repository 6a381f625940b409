"""A whole server on a GPU under `vsched bench serve`, and its memory ledger compared with the driver.

`python -m tests.bench.gpu.serve CHECKPOINT --out FOLDER` adds the ledger and the report of the client to
`server.json`, and the log of the server to that of all steps.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from tests.bench.gpu.page import LedgerCheck, add_results
from tests.bench.gpu.revision import UNKNOWN, said
from tests.bench.gpu.steps import LOG
from tests.bench.servers.server import HOST, Spec, serving
from tests.host_process import free_port

READY_S = 100.0


def driver_used_bytes(device: str) -> int:
    """Return the memory of a device in use by all processes, according to the driver; 0 without a driver."""
    number = device.partition(":")[2] or "0"
    query = ("--query-gpu=memory.used", "--format=csv,noheader,nounits")
    used = said("nvidia-smi", f"--id={number}", *query)
    return 0 if used == UNKNOWN else int(used.split()[0]) << 20


def settings_of(device: str) -> list[str]:
    """Return the settings of all servers here: both stages in one process, on one device."""
    if device == "cpu":
        return ["placement=together", "generate.memory_limit=3GiB", "encode.memory_limit=1MiB"]
    return ["placement=together", f"generate.device={device}", f"encode.device={device}"]


def ledger_check(ledger: dict[str, Any], *, before: int, ready: int, loaded: int) -> LedgerCheck:
    """Compare the ledger of the device's pool with the driver.

    `before` is the memory in use before the server started. The driver counts the CUDA contexts of
    the server's processes; the ledger has them under `peers`.
    """
    of_device = [each for each in ledger["pools"] if each["pool"].startswith("cuda")]
    lines = [line for each in of_device or ledger["pools"] for line in each["lines"]]
    claimed = {line["line"]: 0 for line in lines}
    for line in lines:
        claimed[line["line"]] += line["bytes"]
    return LedgerCheck(claimed, driver_before=before, driver_ready=ready, driver_loaded=loaded)


def main() -> None:
    """Start the server, load it, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu.serve", description=__doc__)
    parser.add_argument("path", help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    port, python = free_port(HOST), [sys.executable, "-m", "vsched"]
    sets = [*settings_of(options.device), f"server.port={port}"]
    command = [*python, "serve", options.path, *(f"--set={one}" for one in sets)]
    spec = Spec(side="vsched", command=command, model="", port=port, version="")
    before = driver_used_bytes(options.device)
    few = ["--sessions=2", "--turns=2", "--output-tokens=4", "--words=8", "--image-pixels=64"]
    small = [*few, "--case=text", "--case=conversation"]
    on_cpu = options.device == "cpu"
    client = [*python, "bench", "serve", f"--url={spec.url}", *(small if on_cpu else ["--turns=4"])]
    with tempfile.TemporaryDirectory() as folder, serving(spec, options.out / LOG) as server:
        ready_s = server.wait_ready(READY_S * (10 if on_cpu else 1))
        print(f"ready after {ready_s:.1f} s", flush=True)
        ready = driver_used_bytes(options.device)
        found: list[Any] = []

        def note() -> None:
            """Write the results so far: the step may run out of time."""
            ledger, loaded = server.statistics()["ledger"], driver_used_bytes(options.device)
            check = ledger_check(ledger, before=before, ready=ready, loaded=loaded)
            add_results(options.out, ledger=check, load=found)

        note()
        status = 0
        for level in (1, 2) if on_cpu else (1, 8, 32):
            report = Path(folder) / f"{level}.json"
            command = [*client, f"--concurrency={level}", f"--json={report}"]
            status |= subprocess.run(command, check=False).returncode
            if report.exists():
                found.append(msgspec.json.decode(report.read_bytes()))
            note()
    sys.exit(status)


if __name__ == "__main__":
    main()
