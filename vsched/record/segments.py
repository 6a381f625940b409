"""The files of a record: `run.vlog` is being written, `run.vlog.000001` and so on are the segments before it.

When a new record begins, the one of the same name is renamed to `run.vlog.previous`, with all its segments, and
replaces the record of that name.
"""

from __future__ import annotations

import re
from pathlib import Path

from vsched.errors import RecordError

_DIGITS = 6


def numbered(path: Path, segment: int) -> Path:
    """Return the name of a complete segment."""
    return path.with_name(f"{path.name}.{segment:0{_DIGITS}d}")


def previous(path: Path) -> Path:
    """Return the name of the record before this one."""
    return path.with_name(f"{path.name}.previous")


def complete_segments(path: Path) -> list[Path]:
    """Return the complete segments of a record, oldest first."""
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
        RecordError: If there are none.
    """
    found = complete_segments(path) if path.parent.is_dir() else []
    if path.is_file():
        found.append(path)
    if not found:
        raise RecordError(f"{path}: no such record")
    return found


def set_aside(path: Path) -> None:
    """Rename a record to `previous`, and delete the record that had that name.

    Raises:
        OSError: If the folder does not allow it.
    """
    earlier = [*complete_segments(path), *([path] if path.is_file() else [])]
    if not earlier:
        return
    kept = previous(path)
    for old in [*complete_segments(kept), *([kept] if kept.is_file() else [])]:
        old.unlink()
    for one in earlier:
        one.rename(kept.with_name(kept.name + one.name.removeprefix(path.name)))
