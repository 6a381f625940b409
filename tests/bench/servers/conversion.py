"""Checkpoints in the format of a peer: made once, and again where the checkpoint changed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from vsched.errors import ConfigError


def made_from(folder: Path, checkpoint: Path, ending: str) -> Path:
    """Return where what a peer reads of a checkpoint lies, or will lie; another place for other weights."""
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
    """Let a command make a file or folder, unless it is there; what is half made is never taken for it.

    Where to write is added to the command, before its last arguments.

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
