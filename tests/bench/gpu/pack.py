"""Collects the wheels for `python -m tests.bench.gpu` on an offline machine.

`python -m tests.bench.gpu.pack FOLDER` puts there the wheel of vsched, the wheels of all packages that vsched and its
tests require, in the versions of `constraints.txt`, and `revision.json`, the commit. Packages that such a machine has,
torch and those around it, are left out together with their own dependencies.
"""

from __future__ import annotations

import argparse
import email
import importlib.metadata
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.bench.gpu.revision import write_revision

ROOT = Path(__file__).parents[3]
CONSTRAINTS = ROOT / "constraints.txt"
ON_THE_MACHINE = frozenset(
    ("huggingface-hub", "jinja2", "numba", "numpy", "safetensors", "tokenizers", "torch", "triton")
)
"""Packages that an image with torch has, in versions that vsched takes. Its transformers may be too old."""
UNUSED = frozenset(("docopt",))
"""Required by num2words for its command alone, and published without a wheel."""
TEST_TOOLS = ("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist")

RequirementsOf = Callable[[str], Sequence[str]]
"""From the name of a package to its requirements, as in its metadata."""


def pins() -> dict[str, str]:
    """Return the version of each package in `constraints.txt`."""
    lines = (line.strip() for line in CONSTRAINTS.read_text().splitlines())
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def roots() -> list[str]:
    """Return the requirements of vsched, of its workers, and of the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    workers = project["optional-dependencies"]["workers"]
    return [*project["dependencies"], *workers, *TEST_TOOLS]


def installed(name: str) -> Sequence[str]:
    """Return the requirements of an installed package."""
    return importlib.metadata.requires(name) or ()


def needed(
    requirements: Iterable[str], requirements_of: RequirementsOf, *, python: str
) -> list[str]:
    """Return the names of all packages to carry, the dependencies of dependencies included."""
    found: set[tuple[str, str]] = set()
    waiting = [(Requirement(each), "") for each in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in ON_THE_MACHINE | UNUSED or not _applies(requirement, extra, python):
            continue
        for wanted in {"", *requirement.extras}:
            if (name, wanted) not in found:
                found.add((name, wanted))
                waiting += [(Requirement(each), wanted) for each in requirements_of(name)]
    return sorted({name for name, _ in found})


def _applies(requirement: Requirement, extra: str, python: str) -> bool:
    if requirement.marker is None:
        return True
    there = {"python_version": python, "python_full_version": f"{python}.3", "extra": extra}
    return requirement.marker.evaluate(
        {**there, "sys_platform": "linux", "platform_system": "Linux"}
    )


def missing(wheels: Iterable[Path], *, python: str) -> list[str]:
    """Return the packages that wheels require, and that are neither among them nor on the machine."""
    described: dict[str, list[str]] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
            metadata = email.message_from_bytes(archive.read(name))
        described[canonicalize_name(metadata["Name"])] = metadata.get_all("Requires-Dist") or []
    wanted = needed(
        [*(f"{name}" for name in described), *roots()],
        lambda name: described.get(name, []),
        python=python,
    )
    return [name for name in wanted if name not in described]


def pack(folder: Path, python: str) -> int:
    """Fill the folder; return the size of the wheels in bytes.

    Raises:
        SystemExit: When the wheels require a package that is not carried.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):  # two versions of a package stop the installation
        old.unlink()
    known = pins()
    wanted = [f"{name}=={known[name]}" for name in needed(roots(), installed, python=python)]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(folder)]
    platforms = [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in range(17, 36)]
    platforms += ["--platform=manylinux2014_x86_64", "--only-binary=:all:"]
    subprocess.run([*pip, f"--python-version={python}", *platforms, *wanted], check=True)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True, stdout=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if lacking := missing(wheels, python=python):
        raise SystemExit(
            f"the wheels require {', '.join(lacking)}: install the versions of constraints.txt here"
        )
    write_revision(ROOT, folder)
    return sum(wheel.stat().st_size for wheel in wheels)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu.pack", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of Python there")
    options = parser.parse_args()
    size = pack(options.folder, options.python)
    print(f"{size / 1e6:.1f} MB of wheels in {options.folder}")


if __name__ == "__main__":
    main()
