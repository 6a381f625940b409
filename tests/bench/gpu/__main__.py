"""All GPU measurements in one command of ten minutes: `python -m tests.bench.gpu --out FOLDER`.

In this order, each with a time limit: small models of many families compared with transformers, a
killed rank, the tests that need a GPU, the tables of workers alone (3B and 7B shapes), a `vsched
serve` under `vsched bench serve`, the memory ledger compared with the driver, the KV cache size
compared with the largest that works, conversations, and quantized weights. `--seconds 200` measures
fewer cases. Results are written after every case, into at most eight files, and a failed step does
not end the others. `python -m tests.bench.gpu.page FOLDER` writes the page of the results.

`--wheels` installs missing packages into a separate folder, from local files alone: `python -m
tests.bench.gpu.pack` collects them. `--device cpu` with the smallest models tests the command
itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[3]
TESTS = (
    *("test_gpu.py", "test_triton_kernels.py", "test_quantized.py", "test_fused_layers.py"),
    "test_fused_tower.py",
)
FAMILIES = (
    *("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llama", "qwen3", "mistral", "gemma2", "gpt_oss"),
    *("qwen3_moe", "deepseek_v3", "qwen3_next", "bamba"),
    *("qwen2_vl", "gemma3", "internvl", "smolvlm"),
)
"""Own paths; decoder-only layers, sliding windows, soft caps, attention sinks; experts, latent attention; states of the
gated delta rule and of Mamba 2; images."""
TESTS_AT_ONCE = 8
FULL_S = 300
"""Time from which on all cases are measured; below, the most important ones."""
ROOM_BYTES = 40 << 30
PACKAGES = ("torch", "triton", "transformers", "numpy", "vsched")
CHECKPOINT = """
import sys
import torch
from vsched_workers.checkpoint.random_init import make_checkpoint
path, size, device = sys.argv[1:]
with torch.device(device):
    make_checkpoint(path, size)
"""
"""As `vsched make-checkpoint`, but the weights are drawn on the device: billions in seconds."""


def main() -> int:
    """Run all steps; the exit status is the number of unsuccessful ones."""
    began_s = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=570, help="for everything together")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--models", default="3b,7b", help="shapes of workers that run alone")
    parser.add_argument("--served", default="3b25", help="size of the checkpoint that is served")
    parser.add_argument("--only", default="", help="names of steps, by commas")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first")
    options = parser.parse_args()
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="gpu-") as scratch,
        tempfile.TemporaryDirectory(prefix="gpu-", dir=_in_memory()) as checkpoints,
    ):
        environment = _environment(
            options.wheels, Path(scratch) / "site", on_cpu=options.device == "cpu"
        )
        if options.wheels is not None and not os.environ.get("VSCHED_GPU_RUN"):
            # The installed packages may be required, or newer than those already imported.
            left_s = options.seconds - (time.monotonic() - began_s)
            again = [sys.executable, "-m", "tests.bench.gpu", *sys.argv[1:], f"--seconds={left_s}"]
            return subprocess.run(again, env=environment, check=False, cwd=ROOT).returncode
        _tell_machine(out, options.device, options.wheels)
        return _run(options, out, Path(checkpoints), environment)


def _environment(wheels: Path | None, site: Path, *, on_cpu: bool) -> dict[str, str]:
    """Return the environment of the steps, with the wheels installed if there are any."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    # Images often forbid bytecode files: every process would compile thousands of modules.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    torch = importlib.util.find_spec("torch")
    if torch is None or not os.access(Path(torch.origin or "/").parent, os.W_OK):
        environment.setdefault("PYTHONPYCACHEPREFIX", str(site.parent / "bytecode"))
    if on_cpu:  # together with the rest of the tests
        environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    if wheels is not None and not os.environ.get("VSCHED_GPU_RUN"):
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
        files = map(str, sorted(wheels.absolute().glob("*.whl")))
        # Modules are compiled when they are imported: most of transformers' never are.
        subprocess.run([*pip, "--no-compile", "--target", str(site), *files], check=True)
        before = environment.get("PYTHONPATH", "")
        # The tree precedes its wheel, which is used only for its entry points.
        paths = [str(ROOT), str(ROOT / "policies"), str(ROOT / "workers"), str(site), before]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment["VSCHED_GPU_RUN"] = "1"
    return environment


def _in_memory() -> str | None:
    """Return a folder in memory if it has room for a checkpoint and much more, else None for the default."""
    folder = Path("/dev/shm")
    return str(folder) if folder.is_dir() and shutil.disk_usage(folder).free > ROOM_BYTES else None


def _tell_machine(out: Path, device: str, packed: Path | None) -> None:
    """Record the machine before anything can fail; `packed` is the folder of wheels."""
    import msgspec

    from tests.bench.gpu.page import Machine
    from tests.bench.gpu.revision import revision_of, said

    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    query = ("--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    on_cpu = platform.processor() or "cpu"
    named = on_cpu if device == "cpu" else said("nvidia-smi", *query)
    machine = Machine(device=named, versions=versions, commit=revision_of(ROOT, packed))
    (out / "machine.json").write_bytes(msgspec.json.encode(machine))


def _run(
    options: argparse.Namespace, out: Path, checkpoints: Path, environment: Mapping[str, str]
) -> int:
    from tests.bench.gpu.serve import settings_of
    from tests.bench.gpu.steps import Step, run_steps

    on_cpu, full = options.device == "cpu", options.seconds >= FULL_S
    patience = 10 if on_cpu else 1
    few = [] if full else ["--few"]
    python, device = [sys.executable, "-m"], ["--device", options.device]
    make = [sys.executable, "-c", CHECKPOINT]
    checkpoint, small = str(checkpoints / "served"), str(checkpoints / "small")
    tests = [str(ROOT / "tests/workers/backends/cuda" / name) for name in TESTS]
    pytest = ["pytest", "-p", "no:cacheprovider", "-W", "default", "--timeout=120", "--maxfail=20"]
    # With each result as it comes: the step may run out of time.
    pytest += ["--verbose", "--durations=8", f"--rootdir={ROOT}", f"--junitxml={out}/tests.xml"]
    # Tests that only compile kernels need no GPU.
    pytest += [f"--numprocesses={TESTS_AT_ONCE}", "-k", "not compile_for"]
    served = [checkpoint, "--out", str(out), *device]
    models = [*python, "tests.bench.gpu.models", *device, *few, "--out", str(out)]
    names = options.models.split(",")
    steps = [
        Step("families", [*python, "tests.parity", *FAMILIES, f"--json={out}/parity.json",
                          f"--jobs={len(os.sched_getaffinity(0))}",
                          f"--device={'cuda-on-host' if on_cpu else options.device}"], 120),
        Step("small", [*make, small, "nano25", options.device], 30),
        Step("recovery", [*python, "tests.bench.parts", "recovery", small, "--rounds=1",
                          "--busy=0", f"--json={out}/recovery.json",
                          *(f"--set={one}" for one in settings_of(options.device))], 60),
        Step("tests", [*python, *pytest, *tests], 100),
        *(Step(f"models-{name}", [*models, "--models", name], 90) for name in names),
        Step("checkpoint", [*make, checkpoint, options.served, options.device], 60),
        Step("serve", [*python, "tests.bench.gpu.serve", *served], 110),
        Step("memory", [*python, "tests.bench.gpu.memory", *served,
                        f"--seconds={0 if on_cpu else 140}"], 150),
        Step("conversations", [*models, "--models", options.models, "--parts", "conversations"], 90),
        Step("weights", [*models, "--models", names[0], "--weights", "int8,int4"], 60),
    ]  # fmt: skip
    wanted = options.only.split(",") if options.only else [step.name for step in steps]
    chosen = [
        dataclasses.replace(step, limit_s=patience * step.limit_s)
        for step in steps
        if step.name in wanted
    ]
    os.chdir(ROOT)
    results = run_steps(chosen, out, seconds=options.seconds, environment=environment)
    return sum(result.ending != "done" for result in results)


if __name__ == "__main__":
    sys.exit(main())
