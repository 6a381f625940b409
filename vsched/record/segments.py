"""The files of a record: `run.vlog` is the one being written, `run.vlog.000001` and so on are those before it.

A new record begins under the name of an old one: the old one is renamed to `run.vlog.previous`, with all its segments,
and only then takes the place of one that had that name.
"""

from __future__ import annotations

import re
from pathlib import Path

from vsched.errors import RecordError

_DIGITS = 6


def numbered(path: Path, segment: int) -> Path:
    """Return the name of a segment that is complete."""
    return path.with_name(f"{path.name}.{segment:0{_DIGITS}d}")


def previous(path: Path) -> Path:
    """Return the name of the record before the one of this name."""
    return path.with_name(f"{path.name}.previous")


def complete_segments(path: Path) -> list[Path]:
    """Return the segments of a record that are complete, oldest first."""
    pattern = re.compile(rf"{re.escape(path.name)}\.(\d{{{_DIGITS},}})")
    found = [
        (int(match[1]), entry)
        for entry in path.parent.iterdir()
        if (match := pattern.fullmatch(entry.name))
    ]
    return [entry for _, entry in sorted(found)]


def find_segments(path: Path) -> list[Path]:
    """Return all segments of a record, oldest first.

    Raises:
        RecordError: When there are none.
    """
    found = complete_segments(path) if path.parent.is_dir() else []
    if path.is_file():
        found.append(path)
    if not found:
        raise RecordError(f"{path}: no such record")
    return found


def set_aside(path: Path) -> None:
    """Rename a record to `previous`, and remove the one that had that name.

    Raises:
        OSError: When the folder does not allow it.
    """
    earlier = [*complete_segments(path), *([path] if path.is_file() else [])]
    if not earlier:
        return
    kept = previous(path)
    for old in [*complete_segments(kept), *([kept] if kept.is_file() else [])]:
        old.unlink()
    for one in earlier:
        one.rename(kept.with_name(kept.name + one.name.removeprefix(path.name)))
