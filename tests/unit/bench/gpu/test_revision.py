"""The commit in the results of a measurement, with a repository, with packed files alone, and with changed ones."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.bench.gpu.revision import UNKNOWN, revision_of, write_revision


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
