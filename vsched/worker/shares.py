"""What a rank may take of its host's cores and memory where the configuration leaves it open."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from vsched.worker.spec import EncodeRole, GenerateRole, RankSpec


def default_threads(cores: int, *, processes: int) -> int:
    """Return the threads of a rank: the cores, shared out among all processes of ranks."""
    return max(cores // max(processes, 1), 1)


def default_limit(available_bytes: int, *, ranks: int) -> int:
    """Return the share of a host's free memory that a rank may take unless the operator says.

    An eighth, or 2 GiB where an eighth is less; but never above a quarter, nor so much that all `ranks` together would
    leave nothing: there are other programs.
    """
    return min(max(available_bytes // 8, 2 << 30), available_bytes // max(4, ranks + 1))


def shared_out(spec: RankSpec, *, cores: int, available_bytes: int) -> RankSpec:
    """Return a specification in which what was left open follows from a host with so many cores and so much memory."""
    share = spec.share
    changes: dict[str, Any] = {}
    for stage in share.threads:
        role: EncodeRole | GenerateRole = getattr(spec, stage)
        threads = default_threads(cores, processes=share.processes)
        settings = dataclasses.replace(role.settings, threads=threads)
        changes[stage] = msgspec.structs.replace(role, settings=settings)
    if share.memory:
        stages = sum(role is not None for role in (spec.encode, spec.generate))
        each = default_limit(available_bytes, ranks=share.processes * stages)
        changes["memory_limit_bytes"] = share.memory_bytes + share.memory * each
    return msgspec.structs.replace(spec, **changes)


def threads_of(spec: RankSpec) -> int:
    """Return the threads that the process of a rank computes with."""
    return max(role.settings.threads for role in (spec.encode, spec.generate) if role is not None)
