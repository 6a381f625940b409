"""Start-up parameters of a rank process, and defaults for its share of the cores and memory of its host."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import msgspec

from vsched.types import ArenaLayout, ModelInfo
from vsched.worker.contract import WorkerSettings
from vsched.worker.memory import control_group_folders

PROFILE_OUTPUTS = 3
"""Output tokens of a sequence: in the step of its last chunk and in two more."""


class StepLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel's limits of a step, by the names of its sizes.

    `state_snapshots` is the number of state snapshots besides the states of slots, and `swap_blocks` that of blocks in
    host memory, which steps do not use.
    """

    slots: int
    batch_tokens: int
    chunk_tokens: int
    context_tokens: int
    block_size: int
    state_snapshots: int = 0
    swap_blocks: int = 0

    def __post_init__(self) -> None:
        if self.batch_tokens < self.slots:
            raise ValueError(
                f"batch_tokens is {self.batch_tokens}, must be at least slots ({self.slots})"
            )

    @property
    def length_max(self) -> int:
        """Maximum sequence length, at least sufficient for the outputs."""
        return max(self.context_tokens, PROFILE_OUTPUTS + 1)

    @property
    def prompt_tokens(self) -> int:
        """Maximum prompt length with room for the outputs."""
        return self.length_max - PROFILE_OUTPUTS

    @property
    def chunk_max(self) -> int:
        """Maximum chunk length."""
        return min(self.chunk_tokens, self.prompt_tokens, self.batch_tokens)


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """Membership of a rank in a group, with the address of the group's leader."""

    address: str = ""
    plugin: str
    settings: WorkerSettings


class EncodeRole(Role, frozen=True, kw_only=True):
    """Membership of a rank in an encode group.

    `items` and `tokens` limit a batch, 0 tokens for no limit; `pixels_max` is the size of the largest accepted image.
    `reserved_bytes` is the configured reservation for the largest batch; None to measure it.
    """

    items: int
    tokens: int
    pixels_max: int
    reserved_bytes: int | None = None


class GenerateRole(Role, frozen=True, kw_only=True):
    """Membership of a rank in a generate group.

    `limits` are the maximum sizes of a step; `pixels_max` is the size of the largest accepted image, 0 for no images.
    `draft` is the draft model, if any, with this rank's share of its KV.
    """

    limits: StepLimits
    pixels_max: int = 0
    draft: ModelInfo | None = None


class HostShare(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of a rank that depend on its host, because they are not configured.

    Filled in by the engine for its own host, and by `vsched host` for another one (`vsched.worker.spec`).

    `processes` is the number of the engine's processes on the host. `threads` are the stages without a configured
    number of threads; `memory` is the number of stages without a memory limit, and `memory_bytes` the sum of their
    weights and of the limits of the others. `context_bytes` is the KV cache of the longest context, with the states of
    recurrent layers, of a generate stage without a limit. `weights_bytes` are the weights of all processes on the host.
    """

    processes: int = 1
    threads: tuple[str, ...] = ()
    memory: int = 0
    memory_bytes: int = 0
    context_bytes: int = 0
    weights_bytes: int = 0


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: its roles (two if the stages share a process) and their common parameters.

    The host of the rank fills in the folder, the arena's descriptor and the addresses.

    `groups` are the groups of its roles, which have `ranks` ranks. `memory_limit_bytes` limits the private memory of
    the process; 0 for no limit. `share` has the parts of limit and threads that depend on the host.
    """

    groups: tuple[str, ...]
    ranks: int = 1
    rank: int = 0
    secret: str = ""
    run_dir: str = ""
    arena_fd: int = -1
    layout: ArenaLayout
    info: ModelInfo
    timeout_s: float
    memory_limit_bytes: int = 0
    share: HostShare = HostShare()
    encode: EncodeRole | None = None
    generate: GenerateRole | None = None

    @property
    def name(self) -> str:
        """The groups and the number, such as `generate-0 rank 1`."""
        return f"{' and '.join(self.groups)} rank {self.rank}"

    @property
    def roles(self) -> dict[str, Role]:
        """The roles by stage."""
        roles = {"encode": self.encode, "generate": self.generate}
        return {stage: role for stage, role in roles.items() if role is not None}

    @property
    def memory_keys(self) -> str:
        """The settings of `memory_limit_bytes`, which is the sum of both in a process with both roles."""
        return " or ".join(f"{stage}.memory_limit" for stage in self.roles)


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


THREADS_MAX = 512
"""Maximum number of threads of a rank."""


def default_threads(cores: int, *, processes: int) -> int:
    """Return the default number of threads of a rank: the cores divided by the number of processes."""
    return min(max(cores // max(processes, 1), 1), THREADS_MAX)


def default_room(available_bytes: int, *, ranks: int) -> int:
    """Return the default memory of a rank besides weights and longest context.

    The maximum of an eighth of `available_bytes` and 4 GiB, but at most a quarter, and at most an equal share among
    all `ranks` and other programs. `available_bytes` is the free memory next to the weights of all ranks.
    """
    return max(min(max(available_bytes // 8, 4 << 30), available_bytes // max(4, ranks + 1)), 0)


def default_limit(share: HostShare, available_bytes: int, *, ranks: int) -> int:
    """Return the memory limit of a process with stages without a limit, given the free memory next to all weights.

    The limits of all `ranks`, KV caches of the longest context included, leave the share of one rank free.
    """
    room = share.memory * default_room(available_bytes, ranks=ranks)
    most = share.memory * max(available_bytes // (ranks + 1), 0)
    return share.memory_bytes + min(room + share.context_bytes, most)


def shared_out(spec: RankSpec, *, cores: int, available_bytes: int) -> RankSpec:
    """Fill in the defaults of a specification for a host with this number of cores and free memory."""
    share = spec.share
    changes: dict[str, Any] = {}
    for stage in share.threads:
        role = spec.roles[stage]
        threads = default_threads(cores, processes=share.processes)
        settings = dataclasses.replace(role.settings, threads=threads)
        changes[stage] = msgspec.structs.replace(role, settings=settings)
    if share.memory:
        free_bytes = available_bytes - share.weights_bytes
        ranks = share.processes * len(spec.roles)
        changes["memory_limit_bytes"] = default_limit(share, free_bytes, ranks=ranks)
    return msgspec.structs.replace(spec, **changes)


def threads_of(spec: RankSpec) -> int:
    """Return the number of compute threads of a rank's process."""
    return max(role.settings.threads for role in spec.roles.values())
