"""The files of a checkpoint directory.

Messages name files by their base name: they may reach a client, and the directories of the host are no client's
business.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vsched.errors import CheckpointError


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Read one JSON object of a checkpoint.

    Raises:
        CheckpointError: When the file is missing or is not a JSON object.
    """
    try:
        with (path / name).open(encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        raise CheckpointError(
            f"{name} is missing. Remedy: give the directory of a complete checkpoint."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{name} cannot be read ({type(error).__name__}). Remedy: download the file again."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{name} is not a JSON object. Remedy: download the file again.")
    return content


def checkpoint_directory(path: str) -> Path:
    """Return the directory of a checkpoint.

    Raises:
        CheckpointError: When there is none.
    """
    directory = Path(path)
    if directory.is_dir():
        return directory
    kind = "is a file" if directory.exists() else "does not exist"
    raise CheckpointError(
        f"checkpoint {directory.name!r} {kind}. Remedy: give the path of a checkpoint's directory "
        "(one that holds config.json), or make one with `vsched make-checkpoint`."
    )
