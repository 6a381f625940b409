"""What a rank process is told when it starts."""

from __future__ import annotations

import msgspec

from vsched.types import ArenaLayout, ModelInfo
from vsched.worker.contract import WorkerSettings
from vsched.worker.profiling_run import StepLimits


class EncodeRole(msgspec.Struct, frozen=True, kw_only=True):
    """The rank belongs to an encode group.

    `items` and `tokens` cap one batch, 0 tokens for no such cap; `pixels_max` is the largest image that is let in.
    `reserved_bytes` is what the operator reserves for the worst batch, None to run it and measure.
    """

    address: str
    plugin: str
    settings: WorkerSettings
    items: int
    tokens: int
    pixels_max: int
    reserved_bytes: int | None = None


class GenerateRole(msgspec.Struct, frozen=True, kw_only=True):
    """The rank belongs to a generate group.

    `limits` are the most that a step may be; `pixels_max` is the largest image that is let in, 0 for no images. `draft`
    is the model that drafts, with this rank's share of its KV, where there is one.
    """

    address: str
    plugin: str
    settings: WorkerSettings
    limits: StepLimits
    pixels_max: int = 0
    draft: ModelInfo | None = None


class HostShare(msgspec.Struct, frozen=True, kw_only=True):
    """What of a rank follows from the machine that it runs on, because the configuration leaves it open.

    The engine fills in what follows from its own machine, and another host what follows from that one
    (`vsched.worker.shares`).

    `processes` are those of the engine's that share the host. `threads` are the stages whose threads are open;
    `memory` is how many stages of the process have an open limit, and `memory_bytes` what the others are given.
    """

    processes: int = 1
    threads: tuple[str, ...] = ()
    memory: int = 0
    memory_bytes: int = 0


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One rank: its roles (two where the stages share a process) and what they share.

    The folder, the arena's descriptor and the addresses are those of the host that the rank runs on, which fills them
    in (`vsched.aio.replicas.launcher.at_home`).

    `name` is the groups and the number, such as `generate-0 rank 1`. `memory_limit_bytes` bounds the private memory of
    the process; 0 is no limit. `share` says what of it and of the threads another host has to say.
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
        """The settings that make up `memory_limit_bytes`: where a process has both roles, the two add up."""
        roles = {"encode": self.encode, "generate": self.generate}
        return " or ".join(
            f"{name}.memory_limit" for name, role in roles.items() if role is not None
        )
