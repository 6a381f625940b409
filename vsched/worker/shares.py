"""What a rank may take of its host's cores and memory where the configuration leaves it open."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vsched.worker.memory import control_group_folders

if TYPE_CHECKING:
    from vsched.worker.spec import EncodeRole, GenerateRole, RankSpec


def usable_cores() -> int:
    """Return the whole cores that the processes here may keep busy, at least one.

    That is what they may run on, and no more than any control group's share of processor time: a container of `2` CPUs
    sees all cores of its host. A part of a core is left to the engine: threads wait for each other after each product,
    and when the share of a period is used up all of them stand still until the next.
    """
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return allowed if quota is None else min(allowed, max(int(quota), 1))


def cpu_quota() -> float | None:
    """Return the CPUs that the narrowest control group of this process may use; None without a limit."""
    shares = (_cores_of(folder, newer=newer) for folder, newer in control_group_folders("cpu"))
    return min((share for share in shares if share is not None), default=None)


def cores_text() -> str:
    """Return the usable cores and where they come from, for people."""
    allowed, quota = len(os.sched_getaffinity(0)), cpu_quota()
    limit = "no quota" if quota is None else f"a quota of {quota:g} CPUs"
    return f"{usable_cores()} usable: affinity to {allowed} of {os.cpu_count()}, {limit}"


def _cores_of(folder: Path, *, newer: bool) -> float | None:
    """Return the cores that a control group may keep busy, None without a limit."""
    names = ["cpu.max"] if newer else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
    try:
        words = " ".join((folder / name).read_text(encoding="ascii") for name in names).split()
    except OSError:
        return None
    if len(words) != 2 or not all(word.isdigit() and int(word) for word in words):
        return None  # `max`, or -1
    quota_us, period_us = map(int, words)
    return quota_us / period_us


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
