"""Defaults for a rank's share of the cores and memory of its host."""

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
    """Return the number of whole cores that this process may use, at least one.

    It is limited by the CPU affinity and by the CPU quotas of control groups: a container with `2` CPUs sees all cores
    of its host. A fraction of a core is left to the engine, because threads wait for each other after each product, and
    all of them stop until the next period when a quota is used up.
    """
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return allowed if quota is None else min(allowed, max(int(quota), 1))


def cpu_quota() -> float | None:
    """Return the smallest CPU quota of this process's control groups; None without a quota."""
    shares = (_cores_of(folder, newer=newer) for folder, newer in control_group_folders("cpu"))
    return min((share for share in shares if share is not None), default=None)


def cores_text() -> str:
    """Return the usable cores and their origin, in words."""
    allowed, quota = len(os.sched_getaffinity(0)), cpu_quota()
    limit = "no quota" if quota is None else f"a quota of {quota:g} CPUs"
    return f"{usable_cores()} usable: affinity to {allowed} of {os.cpu_count()}, {limit}"


def _cores_of(folder: Path, *, newer: bool) -> float | None:
    """Return the CPU quota of a control group; None without a quota."""
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
    """Return the default number of threads of a rank: the cores divided by the number of processes."""
    return max(cores // max(processes, 1), 1)


def default_limit(available_bytes: int, *, ranks: int) -> int:
    """Return the default memory limit of a rank.

    An eighth of the host's free memory, or 2 GiB if that is more; but at most a quarter, and not so much that all
    `ranks` together would leave nothing for other programs.
    """
    return min(max(available_bytes // 8, 2 << 30), available_bytes // max(4, ranks + 1))


def shared_out(spec: RankSpec, *, cores: int, available_bytes: int) -> RankSpec:
    """Fill in the defaults of a specification for a host with this number of cores and free memory."""
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
    """Return the number of compute threads of a rank's process."""
    return max(role.settings.threads for role in (spec.encode, spec.generate) if role is not None)
