"""Rules that no linter checks: dead modules, no unsafe deserialisation, no measured time; files about releases."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SHIPPED = {"vsched": ROOT, "vsched_policies": ROOT / "policies", "vsched_workers": ROOT / "workers"}
CLASS = re.compile(r"^ *class (\w+)", re.MULTILINE)


def sources() -> list[Path]:
    """Every Python file of the shipped packages."""
    return [
        path
        for name, base in SHIPPED.items()
        for path in sorted((base / name).rglob("*.py"))
        if "__pycache__" not in path.parts
    ]


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    base = next(base / name for name, base in SHIPPED.items() if (base / name) in path.parents)
    parts = list(path.relative_to(base.parent).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


IMPORT = re.compile(r"^ *(?:from ([\w.]+) )?import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)
NAMED = re.compile(r"[\"']([\w.]+)[:\"']")


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the imported names of a file; `from a import b` may name a module `a.b` or an object in `a`."""
    text = path.read_text()
    for package, several, one in IMPORT.findall(text):
        yield package
        names = re.findall(r"[\w.]+", several or one)
        yield from (f"{package}.{name}" if package else name for name in names)
    # A module that a process is started with, or that is imported by name.
    yield from NAMED.findall(text)


def test_tidy_no_module_is_dead() -> None:
    """A module is alive if another shipped module imports it or an entry point names it."""
    groups = [PROJECT["scripts"], *PROJECT["entry-points"].values()]
    alive = {target.partition(":")[0] for group in groups for target in group.values()}
    for path in sources():
        own = module_name(path)
        alive.update(name for name in imported_modules(path) if name != own)
    dead = [
        shown(path)
        for path in sources()
        if path.name not in {"__init__.py", "__main__.py"} and module_name(path) not in alive
    ]
    assert not dead


UNSAFE = re.compile(
    r"^\s*(?:import|from) (?:c?[pP]ickle|dill|marshal|cloudpickle|shelve|joblib|multiprocessing\.connection)\b"
    r"|\b(?:torch|np|numpy)\.load\(|_pyobj\(|_serialized\(|trust_remote_code=(?!False)",
    re.MULTILINE,
)


def test_tidy_nothing_is_unpickled() -> None:
    """No pickle, dill, marshal or torch.load; `trust_remote_code` stays off.

    numba pickles compiled code in files of the user, and only the store of kernels reads them.
    """
    found = {shown(path): UNSAFE.findall(path.read_text()) for path in sources()}
    assert found.pop("workers/vsched_workers/backends/cpu/kernel_store.py") == ["import pickle"]
    assert not {path: calls for path, calls in found.items() if calls}
    bad = ("import pickle", "torch.load(x)", "s.recv_pyobj()", "f(trust_remote_code=True)")
    assert all(UNSAFE.search(code) for code in bad)


HURRIED = re.compile(
    r"\btime\.(?:monotonic|perf_counter|process_time|thread_time|time)(?:_ns)?\b"
    r"|from time import .*(?:monotonic|perf_counter|process_time|thread_time|\btime)"
    r"|\btimeout=[1-9]\d*\b(?! \*)|\b(?:timeout|patience)\([1-9][\d.]*\)|\bwait_for\(.*, [1-9][\d.]*\)"
)


def test_tidy_tests_measure_no_time() -> None:
    """The speed of a machine proves nothing about the code; `tests/patience.py` has the waits for tests."""
    tests = ROOT / "tests"
    # Seconds of simulations are virtual, and the others are commands, not tests.
    excepted = [tests / name for name in ("unit/sim", "bench", "vllm_suite", "patience.py")]
    excepted.append(Path(__file__))
    found = [
        f"{shown(path)}: {match[0]}"
        for path in sorted(tests.rglob("*.py"))
        if not {path, *path.parents}.intersection(excepted)
        for match in HURRIED.finditer(path.read_text())
    ]
    assert not found, "tests must not read a clock, or wait for less than their patience"
    bad = ("time.monotonic_ns()", "asyncio.timeout(5)", "wait_for(task, 1)", "timeout=20")
    assert all(HURRIED.search(code) for code in bad)


def test_tidy_class_names_stand_once() -> None:
    """A name means one thing."""
    places: dict[str, list[str]] = {}
    for path in sources():
        for name in CLASS.findall(path.read_text()):
            places.setdefault(name, []).append(shown(path))
    assert not {name: found for name, found in places.items() if len(found) > 1}


# --- releases: files about them agree with each other and with the repository ---

WORKFLOWS = ROOT / ".github/workflows"


def workflow(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((WORKFLOWS / name).read_text())
    return read


def test_release_versions_agree() -> None:
    version = PROJECT["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    released = dict(heading.split(" - ") for heading in headings[1:])
    assert released[version] == str(citation["date-released"])
    assert all(date.fromisoformat(day) for day in released.values())


def test_release_ci_runs_every_supported_python() -> None:
    names = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if ":: 3." in name]
    assert workflow("ci.yml")["jobs"]["test"]["strategy"]["matrix"]["python-version"] == names
    assert PROJECT["requires-python"] == f">={names[0]}"


def test_release_workflow_builds_and_publishes_existing_files() -> None:
    jobs = workflow("release.yml")["jobs"]
    assert set(jobs["publish"]["needs"]) == {"build", "image"}
    text = (WORKFLOWS / "release.yml").read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make (\w+)", text)) <= targets
    assert (ROOT / re.findall(r"file: (\S+)", text)[0]).is_file()
