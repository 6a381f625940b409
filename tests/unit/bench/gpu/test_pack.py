"""The package for a machine without a network: all modules that vsched imports there, in known versions."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.bench.gpu import pack

PYTHON = "3.12"


def write_wheel(folder: Path, name: str, *requirements: str) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    lines = [f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {each}" for each in requirements)]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-1.0.dist-info/METADATA", "\n".join(lines))
    return path


def test_dependencies_of_dependencies_are_carried() -> None:
    """Of each extra, for that system and Python, and not those of packages that are there."""
    known = {
        "app": ["server[fast]>=1", "torch>=2", "old; python_version < '3.12'"],
        "server": ["loop", "quick; extra == 'fast'", "rare; extra == 'other'", "winapi; sys_platform == 'win32'"],
        "quick": ["App"],
    }  # fmt: skip
    found = pack.needed(["app"], lambda name: known.get(name, []), python=PYTHON)
    assert found == ["app", "loop", "quick", "server"]


def test_every_carried_package_has_a_version_in_the_constraints() -> None:
    found = pack.needed(pack.roots(), pack.installed, python=PYTHON)
    assert set(found) <= pack.pins().keys()
    # The command line, the server, the models, the grammars and the tests.
    assert {
        "typer",
        "pydantic-core",
        "uvicorn",
        "transformers",
        "llguidance",
        "pytest-asyncio",
    } <= set(found)
    assert not {"torch", "mpmath", "llvmlite"} & set(found)


def test_a_wheel_whose_requirement_is_not_carried_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "roots", lambda: ["app"])
    wheels = [write_wheel(tmp_path, "app", "helper", "numpy>=2"), write_wheel(tmp_path, "other")]
    assert pack.missing(wheels, python=PYTHON) == ["helper"]
    wheels.append(write_wheel(tmp_path, "helper"))
    assert pack.missing(wheels, python=PYTHON) == []
