"""The files of a checkpoint directory.

Error messages contain base names only: they may reach a client, which should not see the host's directories.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vsched.errors import CheckpointError

if TYPE_CHECKING:
    import torch

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SHARD_BYTES_MAX = 1 << 30
"""Maximum size of a weight file, unless one tensor is larger."""


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


def read_if_there(path: Path, name: str) -> dict[str, Any]:
    """Read one JSON object of a checkpoint; empty if there is no such file.

    Raises:
        CheckpointError: When the file is not a JSON object.
    """
    return read_json(path, name) if (path / name).is_file() else {}


def checkpoint_directory(path: str) -> Path:
    """Return the directory of a checkpoint.

    Raises:
        CheckpointError: When there is none.
    """
    directory = Path(path)
    if os.path.isdir(directory):  # unlike `Path.is_dir`, it raises for no name, however long
        return directory
    kind = "is a file" if os.path.exists(directory) else "does not exist"
    raise CheckpointError(
        f"checkpoint {directory.name!r} {kind}. Remedy: give the path of a checkpoint's directory "
        "(one that holds config.json), or make one with `vsched make-checkpoint`."
    )


def check_new(path: str) -> None:
    """Check that a checkpoint can be written to a path.

    Raises:
        CheckpointError: When there is anything but an empty folder.
    """
    target = Path(path)
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise CheckpointError(
            f"{target.name!r} holds a checkpoint already, or other files. Remedy: name another directory."
        )


@contextlib.contextmanager
def new_checkpoint(path: str) -> Iterator[Path]:
    """Yield a folder to write a checkpoint to; it appears at `path` when the body is done, or not at all.

    The folder is created next to `path`, so that one rename moves it there: a checkpoint is never visible in part.

    Raises:
        CheckpointError: When there is anything but an empty folder at `path`, or it is not writable.
    """
    from safetensors import SafetensorError

    check_new(path)
    target = Path(path).absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as parent:
            folder = Path(parent) / target.name
            folder.mkdir()
            yield folder
            folder.rename(target)
    except (OSError, SafetensorError) as error:  # the latter with a full disk
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise CheckpointError(
            f"{target.name!r} cannot be written ({reason}). "
            "Remedy: free space, or name another directory."
        ) from error


class ShardWriter:
    """Writes weights to safetensors files of bounded size as they come; a single file has no index."""

    def __init__(self, folder: Path) -> None:
        """Write to a folder of a new checkpoint."""
        self._folder = folder
        self._held: dict[str, torch.Tensor] = {}
        self._names: list[list[str]] = []
        self._bytes = self._held_bytes = 0

    def add(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take weights by name; they are written with later ones."""
        for name, each in weights.items():
            if self._held_bytes + each.nbytes > SHARD_BYTES_MAX:
                self._write()
            self._held[name] = each.contiguous()
            self._held_bytes += each.nbytes

    def finish(self) -> None:
        """Write the rest, and the index."""
        self._write()
        count = len(self._names)
        places: dict[str, str] = {}
        for number, names in enumerate(self._names, 1):
            file = SINGLE_FILE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            (self._folder / f"{number}").rename(self._folder / file)
            places |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self._bytes}, "weight_map": places}
            (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True))

    def _write(self) -> None:
        from safetensors.torch import save_file

        if not self._held:
            return
        self._names.append([*self._held])
        save_file(self._held, self._folder / f"{len(self._names)}", metadata={"format": "pt"})
        self._bytes += self._held_bytes
        self._held, self._held_bytes = {}, 0


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Suppress the progress bars of transformers, which would mix with the command's own."""
    import transformers

    library: Any = transformers
    library.logging.disable_progress_bar()
    try:
        yield
    finally:
        library.logging.enable_progress_bar()
