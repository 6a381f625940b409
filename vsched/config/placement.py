"""`placement = "auto"`: whether the two stages run in one process, chosen from the machine and the checkpoint.

A rule, and no measurement: two starts on one machine are alike, and a start takes no longer. `vsched tune` measures.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from vsched.worker.shares import usable_cores

if TYPE_CHECKING:
    from vsched.config.sections import Config

HEAVY_BYTES = 256 << 20
"""From here on reading the weights in each step takes all cores; it lies between 10 and 800 MiB, which were tried."""
CORES_MAX = 8
"""With more cores, half of them are enough for one stage, and the other may encode meanwhile."""


class ChosenPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Where the stages run, and why."""

    placement: Literal["separate", "together"]
    reason: str

    def __str__(self) -> str:
        return f"placement = {self.placement}, because {self.reason}"


def choose_placement(config: Config, *, weights_bytes: int, cores: int) -> ChosenPlacement:
    """Return the placement that a configuration has, or that `auto` stands for; it reads nothing."""
    placement, reason = _choose(config, weights_bytes, cores)
    return ChosenPlacement(placement=placement, reason=reason)


def _choose(
    config: Config, weights_bytes: int, cores: int
) -> tuple[Literal["separate", "together"], str]:
    encode, generate = config.encode, config.generate
    if config.placement != "auto":
        return config.placement, "it is configured"
    if not encode.replicas:
        return "separate", "nothing encodes images"
    if not (encode.on_cpu and generate.on_cpu):
        return "separate", "a stage has a device of its own"
    if config.cluster.elsewhere:
        return "separate", "replicas are on other hosts"
    if (encode.plugin, encode.replicas, encode.tensor_parallel) != (
        generate.plugin,
        generate.replicas,
        generate.tensor_parallel,
    ):
        return "separate", "the stages differ in plug-in, replicas or ranks"
    if encode.threads is not None or generate.threads is not None:
        return "separate", "the threads are configured"
    if cores > CORES_MAX:
        return "separate", f"{cores} cores are enough for two processes"
    weights = f"weights of {weights_bytes >> 20:,} MiB"
    if weights_bytes < HEAVY_BYTES:
        return "separate", f"{weights} are light for a core"
    return "together", f"{weights} are heavy for a share of {cores} cores"


def placed(config: Config) -> Config:
    """Return the configuration with a placement that is chosen, by this machine and the checkpoint's files."""
    if config.placement != "auto":
        return config
    return msgspec.structs.replace(config, placement=placement_here(config).placement)


def placement_here(config: Config) -> ChosenPlacement:
    """Return the placement on this machine of the checkpoint that is configured."""
    size = weights_bytes(config.model.path)
    return choose_placement(config, weights_bytes=size, cores=usable_cores())


def weights_bytes(path: str) -> int:
    """Return the size of a checkpoint's weights as they lie in its folder; 0 where there are none."""
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) if path else 0
