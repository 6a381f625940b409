"""Collects the wheels for `python -m tests.bench.gpu` on an offline machine.

`python -m tests.bench.gpu.pack FOLDER` puts there the wheel of vsched, and in the versions of
`constraints.txt` its dependencies, except those present on such a machine: torch with CUDA, Triton,
transformers and their dependencies. Numba is left out as well, because it compiles for CPUs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
CONSTRAINTS = ROOT / "constraints.txt"
NEEDED = (
    "annotated-doc", "anyio", "certifi", "click", "greenlet", "h11", "httpcore", "httptools",
    "hypothesis", "idna", "iniconfig", "llguidance", "markdown-it-py", "mdurl", "msgspec",
    "num2words", "pillow", "pluggy", "prometheus-client", "pybase64", "Pygments", "pytest",
    "pytest-asyncio", "pytest-timeout", "pyzmq", "rich", "setproctitle", "shellingham", "sniffio",
    "sortedcontainers", "starlette", "typer", "uvicorn", "uvloop",
)  # fmt: skip
"""Packages imported by vsched and its tests on a GPU, with their dependencies."""


def pins() -> dict[str, str]:
    """Return the version of each package, by its name in lower case."""
    lines = (line.strip() for line in CONSTRAINTS.read_text().splitlines())
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {name.lower().replace("_", "-"): version for name, version in pairs}


def pack(folder: Path, python: str) -> int:
    """Fill the folder; return its size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    known = pins()
    wanted = [f"{name}=={known[name.lower()]}" for name in NEEDED]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder)]
    platforms = [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in range(17, 36)]
    platforms += ["--platform=manylinux2014_x86_64", "--only-binary=:all:"]
    subprocess.run([*pip, f"--python-version={python}", *platforms, *wanted], check=True)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True, stdout=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    assert all(zipfile.is_zipfile(wheel) for wheel in wheels)
    return sum(wheel.stat().st_size for wheel in wheels)


def main() -> None:
    """Collect the wheels."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu.pack", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of Python there")
    options = parser.parse_args()
    size = pack(options.folder, options.python)
    print(f"{size / 1e6:.1f} MB of wheels in {options.folder}")


if __name__ == "__main__":
    main()
