"""Start-up parameters of a rank process."""

from __future__ import annotations

import msgspec

from vsched.types import ArenaLayout, ModelInfo
from vsched.worker.contract import WorkerSettings
from vsched.worker.profiling_run import StepLimits


class EncodeRole(msgspec.Struct, frozen=True, kw_only=True):
    """Membership of a rank in an encode group.

    `items` and `tokens` limit a batch, 0 tokens for no limit; `pixels_max` is the size of the largest accepted image.
    `reserved_bytes` is the configured reservation for the largest batch; None to measure it.
    """

    address: str
    plugin: str
    settings: WorkerSettings
    items: int
    tokens: int
    pixels_max: int
    reserved_bytes: int | None = None


class GenerateRole(msgspec.Struct, frozen=True, kw_only=True):
    """Membership of a rank in a generate group.

    `limits` are the maximum sizes of a step; `pixels_max` is the size of the largest accepted image, 0 for no images.
    `draft` is the draft model, if any, with this rank's share of its KV.
    """

    address: str
    plugin: str
    settings: WorkerSettings
    limits: StepLimits
    pixels_max: int = 0
    draft: ModelInfo | None = None


class HostShare(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of a rank that depend on its host, because they are not configured.

    Filled in by the engine for its own host, and by `vsched host` for another one (`vsched.worker.shares`).

    `processes` is the number of the engine's processes on the host. `threads` are the stages without a configured
    number of threads; `memory` is the number of stages without a memory limit, and `memory_bytes` the sum of the
    others.
    """

    processes: int = 1
    threads: tuple[str, ...] = ()
    memory: int = 0
    memory_bytes: int = 0


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: its roles (two if the stages share a process) and their common parameters.

    The host of the rank fills in the folder, the arena's descriptor and the addresses
    (`vsched.aio.launcher.at_home`).

    `name` has the groups and the number, such as `generate-0 rank 1`. `memory_limit_bytes` limits the private memory of
    the process; 0 for no limit. `share` has the parts of limit and threads that depend on the host.
    """

    rank: int
    secret: str
    name: str = ""
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
    def memory_keys(self) -> str:
        """The settings of `memory_limit_bytes`, which is the sum of both in a process with both roles."""
        roles = {"encode": self.encode, "generate": self.generate}
        return " or ".join(
            f"{name}.memory_limit" for name, role in roles.items() if role is not None
        )
