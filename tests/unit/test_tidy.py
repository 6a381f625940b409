"""Rules that no linter checks: dead modules, no unsafe deserialisation, no measured time."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "vsched": ROOT,
    "vsched_policies": ROOT / "policies",
    "vsched_workers": ROOT / "workers",
}
UNSAFE_MODULES = ("pickle", "cPickle", "dill", "marshal", "cloudpickle", "shelve", "joblib")
UNSAFE = (*UNSAFE_MODULES, "multiprocessing", ".load", "_pyobj", "_serialized", "trust_remote_code")
CLASS = re.compile(r"^ *class (\w+)(?:\[.*\])?(?:\(([^)]*)\))?:", re.MULTILINE)


def sources() -> list[Path]:
    """Every Python file of the shipped packages."""
    return [
        path
        for name, base in PACKAGES.items()
        for path in sorted((base / name).rglob("*.py"))
        if "__pycache__" not in path.parts
    ]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def parse_if(words: tuple[str, ...], path: Path) -> ast.Module:
    """Return the tree of a file that has one of some words, otherwise an empty one."""
    text = path.read_text()
    return ast.parse(text if any(word in text for word in words) else "", str(path))


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_name(path: Path) -> str:
    base = next(base / name for name, base in PACKAGES.items() if (base / name) in path.parents)
    parts = list(path.relative_to(base.parent).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the imported names of a file; `from a import b` may name a module `a.b` or an object in `a`."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A module that a process is started with, or that is imported by name.
            yield node.value.partition(":")[0]


def test_tidy_no_module_is_dead() -> None:
    """A module is alive if another shipped module imports it or an entry point names it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["scripts"], *project["entry-points"].values()]
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


def unsafe(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if is_unsafe_module(alias.name)]
        elif isinstance(node, ast.ImportFrom) and is_unsafe_module(node.module or ""):
            found.append(node.module or "")
        elif isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            if call in {"torch.load", "np.load", "numpy.load"} or call.endswith(
                ("_pyobj", "_serialized")
            ):
                found.append(call)
            found += [
                "trust_remote_code"
                for word in node.keywords
                if word.arg == "trust_remote_code"
                and not (isinstance(word.value, ast.Constant) and word.value.value is False)
            ]
    return found


def is_unsafe_module(name: str) -> bool:
    return name.partition(".")[0] in UNSAFE_MODULES or name == "multiprocessing.connection"


def test_tidy_nothing_is_unpickled() -> None:
    """No pickle, dill, marshal or torch.load anywhere; `trust_remote_code` stays off."""
    found = {shown(path): names for path in sources() if (names := unsafe(parse_if(UNSAFE, path)))}
    assert not found


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import pickle", ["pickle"]),
        ("from dill import loads", ["dill"]),
        ("import torch\ntorch.load('x')", ["torch.load"]),
        ("socket.recv_pyobj()", ["socket.recv_pyobj"]),
        ("f(trust_remote_code=True)", ["trust_remote_code"]),
        ("f(trust_remote_code=False)", []),
        ("from safetensors import safe_open", []),
    ],
)
def test_tidy_unpickling_check_finds_calls(code: str, expected: list[str]) -> None:
    assert unsafe(ast.parse(code)) == expected


CLOCKS = ("monotonic", "perf_counter", "process_time", "thread_time", "time")
WAITS = ("timeout", "wait_for", "patience")


def hurried(tree: ast.Module) -> list[int]:
    """Return the lines that read a clock, or that wait for a literal number of seconds."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            if any(alias.name.removesuffix("_ns") in CLOCKS for alias in node.names):
                found.add(node.lineno)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "time" and node.attr.removesuffix("_ns") in CLOCKS:
                found.add(node.lineno)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            limits = [each.value for each in node.keywords if each.arg == "timeout"]
            limits += node.args[-1:] if name in WAITS else []
            if any(isinstance(limit, ast.Constant) and limit.value for limit in limits):
                found.add(node.lineno)
    return sorted(found)


def test_tidy_tests_measure_no_time() -> None:
    """The speed of a machine proves nothing about the code; `tests/patience.py` has the waits for tests."""
    virtual = ROOT / "tests" / "unit" / "sim"  # seconds of simulations are virtual
    names = ("bench", "vllm_suite")  # they are commands, not tests
    commands = [ROOT / "tests" / name for name in names]
    measuring = (path for folder in commands for path in folder.rglob("*.py"))
    excepted = {ROOT / "tests" / "patience.py", *measuring}
    found = [
        f"{shown(path)}:{line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path not in excepted and virtual not in path.parents
        for line in hurried(parse_if(("time", *WAITS), path))
    ]
    assert not found, "tests must not read a clock, or wait for less than their patience"


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("import time\nstarted_s = time.perf_counter()", [2]),
        ("from time import monotonic_ns", [1]),
        ("async with asyncio.timeout(5):\n    await loop.time()", [1]),
        ("await asyncio.wait_for(task, 1)", [1]),
        ("subprocess.run(words,\n    timeout=20)", [1]),
        ("subprocess.run(words, timeout=PATIENCE_S)", []),
        ("async with patience():\n    time.sleep(0.1)", []),
        ("each.result(timeout=0)", []),
    ],
)
def test_tidy_time_check_finds_clocks(code: str, lines: list[int]) -> None:
    assert hurried(ast.parse(code)) == lines


def test_tidy_default_run_needs_no_gpu_and_no_download() -> None:
    """Models are generated, hubs are switched off, and no test uses CUDA without a guard."""
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    assert "HF_HUB_OFFLINE" in conftest
    asking = [
        shown(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if path != Path(__file__)
        and ('from_pretrained("' in path.read_text() or ".cuda()" in path.read_text())
    ]
    assert not asking, "a model name of a hub, or a call that needs a GPU"


def test_tidy_class_names_stand_once() -> None:
    """A name means one thing: only a protocol and the class that satisfies it may share theirs."""
    places: dict[str, list[str]] = {}
    for path in sources():
        for name, bases in CLASS.findall(path.read_text()):
            if "Protocol" not in re.split(r"\W+", bases):
                places.setdefault(name, []).append(shown(path))
    assert not {name: found for name, found in places.items() if len(found) > 1}
