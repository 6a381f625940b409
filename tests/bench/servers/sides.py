"""Servers of each side: vsched, an earlier vsched, and the peers, with equal cores and sizes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.servers.server import HOST, Spec
from vsched.bench.load.generator import fixed_length_fields
from vsched.errors import ConfigError, limit_message

ROOT = Path(__file__).parents[3]
VSCHED = "vsched"
ENTRY = "from vsched.cli.main import main; main()"
BESIDE_KV_BYTES = 4 << 30
"""Memory of a vsched generate rank in addition to its KV cache; for larger models `--set generate.memory_limit`."""
PORTS = {VSCHED: 8301, "before": 8302}
BYTECODE = {
    "PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "vsched-bytecode"),
    "PYTHONDONTWRITEBYTECODE": "",
}
"""Environment that keeps bytecode, as an installation does."""


@dataclass(frozen=True, kw_only=True)
class ServerSizes:
    """Sizes common to both sides.

    `kv_bytes` is the size of the KV cache, `context` the maximum of prompt and output together, and
    `images` the maximum per request.
    """

    threads: int
    slots: int = 64
    context: int = 8192
    kv_bytes: int = 2 << 30
    images: int = 8

    @property
    def text(self) -> str:
        """The sizes as text, stored with each run."""
        return (
            f"threads={self.threads} slots={self.slots} context={self.context} "
            f"kv={self.kv_bytes >> 20}MiB bfloat16"
        )


def thread_sets(threads: int, assignments: Sequence[str]) -> list[str]:
    """Return the settings that split the peer's threads among the ranks of vsched, at least one each.

    Stages in one process take turns, so each has all threads of its replica. Separate stages have
    half each; with more ranks than threads, the ranks share the cores that the peer's threads have
    exclusively.

    Raises:
        ConfigError: When separate stages would have to share one thread.
    """
    if _assigned("placement", assignments, "separate") == "together":
        each = max(threads // _replicas(assignments), 1)
        return [f"encode.threads={each}", f"generate.threads={each}"]
    if threads < 2:
        message = limit_message(
            "--threads: two ranks need a thread each",
            value=threads,
            limit="2 or more",
            remedy="give more, or --set placement=together",
        )
        raise ConfigError(message)
    each = (threads - threads // 2) // _replicas(assignments)
    return [f"encode.threads={threads // 2}", f"generate.threads={max(each, 1)}"]


def _replicas(assignments: Sequence[str]) -> int:
    return int(_assigned("generate.replicas", assignments, "1"))


def _assigned(name: str, assignments: Sequence[str], otherwise: str) -> str:
    """Return the last value given to a setting."""
    given = [text.partition("=")[2] for text in assignments if text.partition("=")[0] == name]
    return given[-1] if given else otherwise


def vsched(
    checkpoint: Path,
    sizes: ServerSizes,
    assignments: Sequence[str],
    *,
    side: str = VSCHED,
    source: Path | None = None,
) -> Spec:
    """Return the specification of a vsched server, from this tree or another one."""
    port = PORTS[side]
    kv_bytes = sizes.kv_bytes // _replicas(assignments)
    sets = [
        f"server.host={HOST}",
        f"server.port={port}",
        "model.name=bench",
        "model.dtype=bfloat16",
        f"generate.slots={sizes.slots}",
        f"generate.context_tokens={sizes.context}",
        "generate.memory.use=pinned",
        f"generate.memory.bytes={kv_bytes}",
        # An explicit limit, like the one derived without settings: without it the whole KV cache is
        # touched at start.
        f"generate.memory_limit={kv_bytes + BESIDE_KV_BYTES}",
        *thread_sets(sizes.threads, assignments),
        *assignments,
    ]
    command = [sys.executable, "-c", ENTRY, "serve", str(checkpoint)]
    tree = source or ROOT
    return Spec(
        side=side,
        command=command + [word for one in sets for word in ("--set", one)],
        model="bench",
        port=port,
        version=f"vsched {described(tree)}",
        environment={"PYTHONPATH": python_path(tree), **BYTECODE},
        exactly=fixed_length_fields,
        directory=tree,
    )


def python_path(tree: Path) -> str:
    """Return the search path that imports a tree."""
    return os.pathsep.join(str(tree / part) for part in (".", "policies", "workers"))


def described(tree: Path) -> str:
    """Return the commit of a tree, with `-dirty` if it has changes; without git, its name."""
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--exclude", "*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if found.endswith("-dirty"):
        changes = subprocess.run(
            ["git", "-C", str(tree), "diff", "HEAD"], capture_output=True, check=False
        ).stdout
        found += f"-{hashlib.blake2b(changes, digest_size=3).hexdigest()}"
    return found or tree.name
