"""The server of vsched, and the sizes common to it and its peers."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.gpu.revision import commit_of
from tests.bench.servers.server import HOST, Spec

ROOT = Path(__file__).parents[3]
VSCHED = "vsched"
PORT = 8301
ENTRY = "from vsched.cli.main import main; main()"
BYTECODE = {
    "PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "vsched-bytecode"),
    "PYTHONDONTWRITEBYTECODE": "",
}
"""Environment that keeps bytecode, as an installation does."""


@dataclass(frozen=True, kw_only=True)
class ServerSizes:
    """Sizes common to both sides.

    `kv_bytes` is the size of the KV cache, `context` the maximum of prompt and output together.
    """

    threads: int
    slots: int = 32
    context: int = 2048
    kv_bytes: int = 2 << 30

    @property
    def text(self) -> str:
        """The sizes as text, stored with each run."""
        return (
            f"threads={self.threads} slots={self.slots} context={self.context} "
            f"kv={self.kv_bytes >> 20}MiB bfloat16"
        )


def python_path(tree: Path) -> str:
    """Return the search path that imports a tree."""
    return os.pathsep.join(str(tree / part) for part in (".", "policies", "workers"))


def described() -> str:
    """Return the commit of the tree, with a digest of its changes if it has some."""
    found = commit_of(ROOT)
    if found.endswith("-dirty"):
        command = ["git", "-C", str(ROOT), "diff", "HEAD"]
        changes = subprocess.run(command, capture_output=True, check=False).stdout
        found += f"-{hashlib.blake2b(changes, digest_size=3).hexdigest()}"
    return found


def spec_of(checkpoint: Path, assignments: Sequence[str]) -> Spec:
    """Return the specification of a server for a checkpoint."""
    sets = [word for text in assignments for word in ("--set", text)]
    return Spec(
        side=checkpoint.name,
        command=[
            *(sys.executable, "-c", ENTRY, "serve", str(checkpoint)),
            *("--host", HOST, "--port", str(PORT), *sets),
        ],
        model=checkpoint.name,
        port=PORT,
        version="",
        environment={"PYTHONPATH": python_path(ROOT), **BYTECODE},
        directory=ROOT,
    )
