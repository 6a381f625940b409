"""Checkpoints in the format of a peer, converted once, and again if the checkpoint changes."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from vsched.errors import ConfigError


def made_from(folder: Path, checkpoint: Path, ending: str) -> Path:
    """Return the path of a peer's version of a checkpoint; other weights give another path."""
    digest = hashlib.sha256()
    for path in sorted(checkpoint.iterdir()):
        digest.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode())
    return folder / "models" / f"{checkpoint.name}-{digest.hexdigest()[:12]}-{ending}"


def make_when_missing(
    path: Path,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    what: str,
    last: Sequence[str] = (),
) -> None:
    """Create a file or folder with a command unless it exists; an incomplete result is never used.

    The output path is appended to the command, before its last arguments.

    Raises:
        ConfigError: When the command fails.
    """
    if path.exists():
        return
    path.parent.mkdir(exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    if part.is_dir():
        shutil.rmtree(part)
    done = subprocess.run(
        [*command, str(part), *last],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    if done.returncode:
        raise ConfigError(f"{what}:\n{done.stderr[-2000:]}")
    part.rename(path)
