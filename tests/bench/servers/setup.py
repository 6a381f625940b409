"""Installs a peer into its own virtual environment; completed steps are not repeated."""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from rich.console import Console

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
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    constraints.write_text(CONSTRAINTS)
    wanted = [*peer.packages, "-c", str(constraints), *shlex.split(pip_arguments)]
    with console.status(f"{peer.name}: installing (takes minutes)"):
        subprocess.run([*pip, "install", "--quiet", *wanted], check=True)
    if peer.unwanted:
        subprocess.run([*pip, "uninstall", "--quiet", "-y", *peer.unwanted], check=True)
    for what, act in peer.steps:
        with console.status(f"{peer.name}: {what}"):
            act(folder)
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
