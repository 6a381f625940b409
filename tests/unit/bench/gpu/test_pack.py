"""The package for a machine without a network: all modules that vsched imports there, in known versions."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.bench.gpu import pack
from tests.bench.gpu.revision import UNKNOWN, revision_of, write_revision

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


# --- the commit in the results of a measurement ---


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with one commit."""
    root = tmp_path / "tree"
    (root / "vsched").mkdir(parents=True)
    (root / "vsched/one.py").write_text("one = 1\n")
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    return root


def test_changes_since_the_commit_are_reported(tree: Path) -> None:
    commit = revision_of(tree, None)
    assert len(commit) == 8
    (tree / "vsched/one.py").write_text("one = 2\n")
    assert revision_of(tree, None) == f"{commit}-dirty"


def test_packed_commit_is_used_without_a_repository(tree: Path, tmp_path: Path) -> None:
    commit, packed = revision_of(tree, None), tmp_path / "wheels"
    packed.mkdir()
    assert revision_of(tmp_path, packed) == UNKNOWN
    write_revision(tree, packed)
    (tree / ".git").rename(tmp_path / "elsewhere")
    assert revision_of(tree, None) == UNKNOWN
    assert revision_of(tree, packed) == commit
    (tree / "vsched/two.py").write_text("")
    assert revision_of(tree, packed) == f"{commit} with later changes"
