"""The settings of the bridge, from vLLM's `--additional-config`, or a TOML file that it names."""

from __future__ import annotations

import contextlib
import os
import tempfile
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from vsched.config.policies import HostSettings, read_host_settings
from vsched.errors import ConfigError
from vsched.policy_host import HostCapabilities

NAME_CHARACTERS_MAX = 64
"""Maximum length of a tenant or session. A policy keeps names in its state, which a longer one could fill."""
SCHEDULER = ("generate.admission", "generate.step", "generate.preemption")
EMBEDDINGS = ("encode.eviction",)
FRONT = ("arrival", "routing")
REFUSED = {
    "encode.admission": "it encodes an image in the step and the worker of its request",
    "encode.encoding": "it encodes the images of the next chunk",
    "encode.dispatch": "it has no encode groups",
    "encode.reclaim": "it takes no embedding from a running request",
    "generate.eviction": "its queue of free blocks is private, and hybrid models have several",
    "generate.insertion": "it inserts every full block, and its workers rely on that",
    "generate.memory": "it sizes its KV cache itself (--gpu-memory-utilization)",
    "media.pruning": "it prunes videos itself (--video-pruning-rate)",
    "generate.drafting": "it drafts the same number of tokens for each request",
}
"""Reasons why vLLM does not follow a policy of these tables."""


def read_settings(vllm_config: Any, version: str, called: Collection[str]) -> HostSettings:
    """Read `{"vsched": "policies.toml"}`, or tables in place of the path, and build the policies of `called`.

    Raises:
        ConfigError: If a file, table or value is not valid.
        PolicyError: If a policy needs a feature that vLLM lacks.
    """
    more = vllm_config.additional_config
    tables = more.get("vsched", {}) if isinstance(more, Mapping) else {}
    if isinstance(tables, str):
        try:
            tables = tomllib.loads(Path(tables).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"vsched: {tables!r} cannot be read as TOML ({error}). Remedy: give an absolute path"
            ) from error
    if not isinstance(tables, Mapping):
        raise ConfigError(
            f"vsched: {tables!r} is neither a path nor tables. Remedy: give one of them"
        )
    return read_host_settings(tables, capabilities(version), called)


def capabilities(version: str) -> HostCapabilities:
    """Return the capabilities of vLLM with this bridge."""
    tables = frozenset(SCHEDULER + EMBEDDINGS + FRONT)
    features = frozenset({"hold", "time"})
    host = f"vLLM {version}"
    return HostCapabilities(host=host, tables=tables, refused=REFUSED, features=features)


def target_of(arguments: Mapping[str, Any], arrived_ns: int) -> int | None:
    """Return the time by which a request should have its first token, from its extra arguments."""
    target_ms = arguments.get("ttft_target_ms")
    if isinstance(target_ms, int | float) and 0 <= target_ms < 1e9:
        return arrived_ns + int(target_ms * 1e6)
    return None


def tenant_of(arguments: Mapping[str, Any]) -> str:
    """Return the tenant in the extra arguments of a request, cut to the length of names of tenants."""
    return str(arguments.get("tenant", ""))[:NAME_CHARACTERS_MAX]


def statistics_path(vllm_config: Any) -> Path:
    """Return the file with the figures of the scheduler; the middleware, another process, finds it by the same name."""
    rank = vllm_config.parallel_config.data_parallel_rank
    name = f"vsched-vllm-{os.getuid()}-{vllm_config.instance_id}-{rank}.json"
    return Path(tempfile.gettempdir()) / name


def write_file(path: Path, data: bytes) -> None:
    """Replace a file of this user in the folder for temporary files; an error is the system's, and of no importance."""
    temporary = path.with_suffix(".new")
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(data)
        temporary.replace(path)
