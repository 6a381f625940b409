"""The commit of a measurement, also on a machine that has the files but no repository.

`pack` writes the commit next to the wheels, with a digest of the source files. Where git finds no repository, that
commit is reported, and whether the files are still those.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import msgspec

NAME = "revision.json"
SOURCES = ("vsched", "policies", "workers", "tests")
UNKNOWN = "unknown"


class PackedRevision(msgspec.Struct, frozen=True):
    """A commit, as `git describe` names it, and a digest of the source files."""

    commit: str
    sources: str


def write_revision(root: Path, folder: Path) -> None:
    """Write the revision of a tree into a folder."""
    revision = PackedRevision(commit_of(root), digest(root))
    (folder / NAME).write_bytes(msgspec.json.encode(revision))


def revision_of(root: Path, packed: Path | None) -> str:
    """Return the commit of a tree and whether files differ from it; `packed` is the folder of `pack`, if any."""
    commit = commit_of(root)
    if commit != UNKNOWN or packed is None or not (packed / NAME).exists():
        return commit
    written = msgspec.json.decode((packed / NAME).read_bytes(), type=PackedRevision)
    changed = "" if written.sources == digest(root) else " with later changes"
    return written.commit + changed


def commit_of(root: Path) -> str:
    """Return the commit of a repository, with `-dirty` if tracked files differ from it."""
    if not (root / ".git").exists():  # else a repository around the tree would be described
        return UNKNOWN
    return said(
        "git", "-C", str(root), "describe", "--always", "--abbrev=8", "--dirty", "--exclude=*"
    )


def said(*command: str) -> str:
    """Return the output of a command, `UNKNOWN` if it fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return UNKNOWN
    return ran.stdout.strip() if not ran.returncode else UNKNOWN


def digest(root: Path) -> str:
    """Return a digest of the names and contents of all Python files of a tree."""
    made = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            made.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return made.hexdigest()
