"""Calibration files: the importance of each input of a checkpoint's linear layers, as written by `vsched calibrate`.

For each layer there is the mean square of each input, over texts and images provided by the user. An error of a weight
counts in proportion to the square of its input, so scales are chosen to minimize the weighted error. The file is
safetensors: `language.` or `vision.` and the name of the layer in its part of the model, float32 [in]. Its metadata has
a digest of the checkpoint: values of another one would be useless, without any visible error.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from vsched.errors import CheckpointError

Part = Literal["language", "vision"]
Squares = Mapping[str, npt.NDArray[np.float32]]
"""The mean squares of inputs, [in], by the layer's name in its part of the model."""

FORMAT = "vsched calibration 1"
_SAMPLE_BYTES = 256
_NUMBER = re.compile(r"\d+")
_STAGES: Mapping[Part, str] = {"language": "generate", "vision": "encode"}


class _StoredTensor(NamedTuple):
    """A tensor in a file: its shape, and the range of its bytes."""

    name: str
    file: Path
    shape: tuple[int, ...]
    start: int
    stop: int


def checkpoint_digest(directory: Path) -> str:
    """Return a digest of a checkpoint's weights: of all names and shapes, and of the first bytes of each tensor."""
    digest = hashlib.sha256()
    stored = sorted(_stored(directory), key=lambda each: each.name)
    opened = {file: file.open("rb") for file in dict.fromkeys(each.file for each in stored)}
    try:
        for each in stored:
            file = opened[each.file]
            file.seek(each.start)
            sample = file.read(min(_SAMPLE_BYTES, each.stop - each.start))
            digest.update(f"{each.name} {[*each.shape]} ".encode() + sample)
    finally:
        for file in opened.values():
            file.close()
    return digest.hexdigest()


def _stored(directory: Path) -> Iterator[_StoredTensor]:
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            try:
                header = json.loads(file.read(size))
            except (ValueError, MemoryError, OverflowError):
                continue  # loading the weights reports the error
        if header.get("__metadata__", {}).get("format") == FORMAT:
            continue  # it may be next to the weights
        for name, said in header.items():
            if name != "__metadata__":
                start, stop = said["data_offsets"]
                yield _StoredTensor(
                    name, path, tuple(said["shape"]), 8 + size + start, 8 + size + stop
                )


def write_calibration(
    path: Path, directory: Path, squares: Mapping[Part, Squares], said: Mapping[str, str]
) -> None:
    """Write the mean squares for parts of a checkpoint, with metadata."""
    from safetensors.numpy import save_file

    tensors = {
        f"{part}.{name}": values
        for part, found in squares.items()
        for name, values in found.items()
    }
    metadata = {**said, "format": FORMAT, "checkpoint": checkpoint_digest(directory)}
    # All or nothing: a partial file would look like one of another checkpoint.
    partial = path.with_name(f"{path.name}.partial")
    save_file(tensors, partial, metadata=metadata)
    partial.replace(path)


def read_calibration(file: str, directory: Path, part: Part) -> Squares:
    """Return the mean squares for a part of a checkpoint.

    Raises:
        CheckpointError: When the file cannot be read, is of another checkpoint, or has invalid values for a layer.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as content:
            metadata: Mapping[str, str] = content.metadata() or {}
            found: dict[str, npt.NDArray[Any]] = {
                name.removeprefix(f"{part}."): content.get_tensor(name)
                for name in content.keys()  # noqa: SIM118 - it is no mapping
                if name.startswith(f"{part}.")
            }
    except FileNotFoundError:
        raise _wrong(part, file, "is not there", "a file that `vsched calibrate` wrote") from None
    except (SafetensorError, OSError) as error:
        reason = f"cannot be read ({type(error).__name__})"
        raise _wrong(part, file, reason, "a file that `vsched calibrate` wrote") from error
    if metadata.get("format") != FORMAT:
        given = repr(metadata.get("format", "none"))
        raise _wrong(part, file, f"has the format {given}", repr(FORMAT))
    own = checkpoint_digest(directory)
    if metadata.get("checkpoint") != own:
        given = str(metadata.get("checkpoint"))[:12]
        wanted = f"that of {directory.name}, {own[:12]}"
        raise _wrong(part, file, f"is of another checkpoint, {given}", wanted)
    if not found:
        more = "--images" if part == "vision" else "--texts"
        wanted = f"layers of the {part} model (`vsched calibrate {more}`)"
        raise _wrong(part, file, "says nothing of any layer", wanted)
    for name, values in found.items():
        if values.ndim != 1 or values.dtype != np.float32:
            said = f"has {values.dtype} {[*values.shape]} of {name}"
            raise _wrong(part, file, said, "float32 [inputs]")
        wrong = values[~(np.isfinite(values) & (values >= 0))]
        if len(wrong):
            said = f"has {wrong[0]} among the mean squares of {name}"
            raise _wrong(part, file, said, "finite numbers >= 0")
    return found


def check_calibration(file: str, directory: Path, part: Part) -> None:
    """Check a file against the headers of a checkpoint, as far as possible without the model.

    Raises:
        CheckpointError: As `read_calibration`, and when a layer has other inputs, or is missing while the corresponding
            layers of other blocks are present.
    """
    squares = read_calibration(file, directory, part)
    patterns = {_NUMBER.sub("*", name) for name in squares}
    for stored in _stored(directory):
        layer = stored.name.removesuffix(".weight")
        if len(stored.shape) != 2 or layer == stored.name:
            continue
        name = next((end for end in _ends(layer) if _NUMBER.sub("*", end) in patterns), None)
        if name is not None:
            check_layer(squares, name, stored.shape[1], file, part)


def check_layer(squares: Squares, name: str, inputs: int, file: str, part: Part) -> None:
    """Check that a file has usable values for a layer.

    Raises:
        CheckpointError: When the layer is missing or has another number of inputs.
    """
    found = squares.get(name)
    if found is None:
        raise _wrong(part, file, f"says nothing of {name}", f"its {inputs:,} inputs")
    if len(found) != inputs:
        raise _wrong(part, file, f"has {len(found):,} inputs of {name}", f"{inputs:,}")


def _ends(name: str) -> Iterator[str]:
    """Yield a name, and its suffixes without the first parts."""
    while name:
        yield name
        name = name.partition(".")[2]


def _wrong(part: Part, file: str, found: str, expected: str) -> CheckpointError:
    stage = _STAGES[part]
    return CheckpointError(
        f"{stage}.calibration: {file} {found}; expected: {expected}. Remedy: write it again with `vsched calibrate` "
        f"for this checkpoint, or leave {stage}.calibration empty."
    )
