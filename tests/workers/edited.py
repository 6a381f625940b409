"""Copies of checkpoints with other files, and with other entries in their JSON files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Copy = Callable[..., Path]
"""A fixture that copies a checkpoint for a test to modify."""
Content = bytes | dict[str, Any] | None


def merged(content: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return JSON with other values, in nested objects as well; None removes an entry."""
    found = dict(content)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = merged(found[key], value) if nested else value
    return {key: value for key, value in found.items() if key not in changes or value is not None}


def write(file: Path, content: Content) -> Path:
    """Write a file, change entries of its JSON, or delete it; return its folder."""
    if content is None:
        file.unlink()
    elif isinstance(content, bytes):
        file.write_bytes(content)
    else:
        known = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(merged(known, content)))
    return file.parent


def copy_of(path: Path, to: Path, **config: Any) -> Path:
    """Copy a checkpoint into a new folder, with other entries in its `config.json`; return that folder."""
    return write(Path(shutil.copytree(path, to / "copy")) / "config.json", config)
