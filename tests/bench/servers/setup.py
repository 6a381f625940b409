"""Installs a peer into its own virtual environment; completed steps are not repeated."""

from __future__ import annotations

import functools
import hashlib
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tests.bench.servers.peers import Peer
from vsched.errors import ConfigError

CONSTRAINTS = "torch==2.13.0\ntorchvision==0.28.0\n"
"""pip treats the CPU build as 2.13.0, and prefers it if an index or a folder of wheels has it."""
ANSWER_S = 10.0
STAMP = ".peer"


def mark(peer: Peer) -> str:
    """Return the stamp of a complete installation."""
    text = "\n".join((CONSTRAINTS, *peer.packages, *peer.unwanted, *peer.contents))
    return hashlib.sha256(text.encode()).hexdigest()


def install(peer: Peer, folder: Path, *, pip_arguments: str, console: Console) -> None:
    """Install a peer into a folder, unless it is there already."""
    stamp = folder / STAMP
    if stamp.exists() and stamp.read_text() == mark(peer):
        console.print(f"{peer.name}: installed in {folder}")
        return
    check_indexes(pip_arguments)
    constraints = folder / "constraints.txt"
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip"]
    steps: list[tuple[str, Callable[[], None]]] = []

    def step(what: str, command: Sequence[str]) -> None:
        steps.append((what, lambda: _call(command)))

    if not python.exists():
        step("making the environment", [sys.executable, "-m", "venv", str(folder)])
    steps.append(("pinning torch", lambda: _write(constraints)))
    wanted = [*peer.packages, "-c", str(constraints), *shlex.split(pip_arguments)]
    step("installing (takes minutes)", [*pip, "install", "--quiet", *wanted])
    if peer.unwanted:
        step(
            "removing packages that need CUDA", [*pip, "uninstall", "--quiet", "-y", *peer.unwanted]
        )
    steps += [(what, functools.partial(act, folder)) for what, act in peer.steps]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for what, act in steps:
            task = progress.add_task(f"{peer.name}: {what}", total=1)
            act()
            progress.update(task, completed=1)
    stamp.write_text(mark(peer))


def check_indexes(pip_arguments: str) -> None:
    """Check each pip index once, because pip retries an unreachable one for each package.

    Raises:
        ConfigError: When one does not respond.
    """
    for word in shlex.split(pip_arguments):
        url = word.rpartition("=")[2]
        if not url.startswith(("https://", "http://")):
            continue
        try:
            urllib.request.urlopen(url, timeout=ANSWER_S).close()
        except urllib.error.HTTPError:
            continue  # it responds; pip reports whatever it lacks
        except OSError as error:
            raise ConfigError(
                f"{url}: no answer within {ANSWER_S:g} s ({error}). Remedy: leave it out of --pip-arguments, or give "
                "--find-links with a folder of wheels; pip takes the CPU build of torch wherever it finds it"
            ) from error


def _call(command: Sequence[str]) -> None:
    subprocess.run(command, check=True)


def _write(constraints: Path) -> None:
    constraints.write_text(CONSTRAINTS)
