"""`placement = "auto"`: choose from machine and checkpoint whether the two stages run in one process.

It is a rule and not a measurement, so that two starts on one machine are alike and no start is slowed. `vsched tune`
measures instead.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from vsched.worker.shares import usable_cores

if TYPE_CHECKING:
    from vsched.config.sections import Config

HEAVY_BYTES = 256 << 20
"""From this size on, reading the weights in each step takes all cores; 10 and 800 MiB were measured."""
CORES_MAX = 8
"""With more cores, half of them are enough for one stage while the other encodes."""
ADVICE = (
    "For text of 8 clients or more at a time, --set placement=together --set encode.replicas=2 "
    "--set generate.replicas=2 may serve more; vsched tune measures it"
)
"""Two processes that each run both stages served text up to 1.7 times as fast.

That was with 10 MiB of weights on two cores with AVX2. With AVX-512, where a decode step is one call, it was 0.9 to 1.1
times; with images, there was no gain.
"""


class ChosenPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Placement of the stages, and the reason for it."""

    placement: Literal["separate", "together"]
    reason: str
    advice: str = ""
    """Suggestion to measure, if the best placement depends on the workload."""

    def __str__(self) -> str:
        text = f"placement = {self.placement}, because {self.reason}"
        return f"{text}. {self.advice}" if self.advice else text


def choose_placement(config: Config, *, weights_bytes: int, cores: int) -> ChosenPlacement:
    """Return the configured placement, or resolve `auto`; this does no I/O."""
    separate = partial(ChosenPlacement, placement="separate")
    encode, generate = config.encode, config.generate
    if config.placement != "auto":
        return ChosenPlacement(placement=config.placement, reason="it is configured")
    if not encode.replicas:
        return separate(reason="nothing encodes images")
    if encode.device != generate.device or not (generate.on_cpu or generate.on_cuda):
        return separate(reason="a stage has a device of its own")
    if config.cluster.elsewhere:
        return separate(reason="replicas are on other hosts")
    if (encode.plugin, encode.replicas, encode.tensor_parallel) != (
        generate.plugin,
        generate.replicas,
        generate.tensor_parallel,
    ):
        return separate(reason="the stages differ in plug-in, replicas or ranks")
    if generate.on_cuda:
        return ChosenPlacement(
            placement="together",
            reason=f"the stages share {generate.device}, its context and its allocator",
        )
    if encode.threads is not None or generate.threads is not None:
        return separate(reason="the threads are configured")
    if cores > CORES_MAX:
        return separate(reason=f"{cores} cores are enough for two processes")
    weights = f"weights of {weights_bytes >> 20:,} MiB"
    if weights_bytes < HEAVY_BYTES:
        alone = config.generate.replicas == 1 and cores > 1
        return separate(reason=f"{weights} are light for a core", advice=ADVICE if alone else "")
    reason = f"{weights} are heavy for a share of {cores} cores"
    return ChosenPlacement(placement="together", reason=reason)


def placed(config: Config) -> Config:
    """Resolve the placement of a configuration, from this machine and the checkpoint's files."""
    if config.placement != "auto":
        return config
    return msgspec.structs.replace(config, placement=placement_here(config).placement)


def placement_here(config: Config) -> ChosenPlacement:
    """Placement of the configured checkpoint on this machine."""
    size = weights_bytes(config.model.path)
    return choose_placement(config, weights_bytes=size, cores=usable_cores())


def weights_bytes(path: str) -> int:
    """Size of the weight files in a checkpoint's folder; 0 if there are none."""
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) if path else 0
