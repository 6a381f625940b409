"""Defaults that depend on the machine: `device = "auto"`, keys whose default is 0, and `placement = "auto"`.

`settle` resolves the devices that are certain without a GPU library; `vsched.devices` resolves the rest. The placement
follows a rule and not a measurement, so that two starts on one machine are alike and no start is slowed; `vsched tune`
measures instead. Defaults do not depend on the size of a device, so that simulations and records do not depend on the
host. Rejected: a section of keys for GPUs, in which each key would exist twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from vsched.config.sections import AUTO, CPU, Config
from vsched.worker.memory import weights_bytes
from vsched.worker.spec import usable_cores

DEVICE_FILES: tuple[str, ...] = (
    "/dev/nvidiactl",
    "/dev/nvidia0",
    "/proc/driver/nvidia",
    "/dev/dxg",
)
"""Files of NVIDIA's driver, also in containers, and of WSL. Without any of them, no CUDA device can be used."""
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
PARTS = {"auto": 1.0, "int8": 0.55, "int4": 0.32}
"""Size of quantized weights with their scales, compared with 16 bits."""


class DeviceDefaults(NamedTuple):
    """Defaults of keys that depend on the device of the generate stage."""

    slots: int
    max_batch_tokens: int
    chunk_tokens: int
    pixel_bytes: int
    embedding_bytes: int


CPU_DEFAULTS = DeviceDefaults(
    slots=64,
    max_batch_tokens=2048,
    chunk_tokens=512,
    pixel_bytes=1 << 30,
    embedding_bytes=256 << 20,
)
CUDA_DEFAULTS = DeviceDefaults(
    # Defaults of vLLM: `max_num_seqs` of most devices, `max_num_batched_tokens` of large ones, chunks up to a whole
    # step, 4 GiB of preprocessed images. `step_target_ms` shortens chunks while requests decode.
    slots=256,
    max_batch_tokens=8192,
    chunk_tokens=8192,
    pixel_bytes=4 << 30,
    # As many images for each slot as on a CPU.
    embedding_bytes=1 << 30,
)


class DeviceChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of the stages, in a sentence.

    Attributes:
        text: The devices, and the reason.
        missed: True if the host may have a GPU that `auto` does not use.
        uses_cuda: True if a stage runs on a CUDA device.
    """

    text: str
    missed: bool = False
    uses_cuda: bool = False


def is_open(config: Config) -> bool:
    """True if a stage with replicas has no concrete device yet."""
    return AUTO in {one.device for one in (config.encode, config.generate) if one.replicas}


def settle(config: Config, environ: Mapping[str, str]) -> tuple[Config, DeviceChoice | None]:
    """Resolve `auto` to `cpu` if no GPU is needed to know that, and the defaults of a configuration without `auto`.

    Also return the devices and the reason for them; None if they are still open.
    """
    reason, missed = "it is configured", False
    if is_open(config):
        reason = reason_without_gpu(environ)
        if not reason:
            reason, missed = reason_for_cpu(config), True
        if not reason:
            return config, None
        config = with_devices(config, CPU)
    stages = [one for one in (config.encode, config.generate) if one.replicas]
    names = " and ".join(dict.fromkeys(one.device for one in stages))
    return with_device_defaults(config), DeviceChoice(
        text=f"{names}, because {reason}", missed=missed
    )


def assumed(config: Config, device: str = CPU) -> Config:
    """A configuration with `auto` as this device, for checks and simulations, which do not depend on the host."""
    return with_device_defaults(with_devices(config, device))


def reason_for_cpu(config: Config) -> str:
    """Reason why stages with `auto` run on a CPU even if there is a GPU; empty if there is none."""
    if config.cluster.elsewhere:
        return "replicas are on other hosts, whose devices are not known: set encode.device and generate.device"
    if config.model.deterministic:
        return "model.deterministic requires a CPU"
    if config.generate.kv_dtype == "int8":
        return "generate.kv_dtype = int8 requires a CPU"
    return ""


def reason_without_gpu(environ: Mapping[str, str]) -> str:
    """Reason why this process certainly sees no GPU; empty if it may see one. No library is loaded."""
    visible = environ.get(VISIBLE_DEVICES)
    if visible is not None and visible.partition(",")[0].strip() in ("", "-1", "NoDevFiles"):
        return f"{VISIBLE_DEVICES} is {visible!r}"
    if not any(Path(file).exists() for file in DEVICE_FILES):
        return f"this host has no GPU: {DEVICE_FILES[0]} does not exist"
    return ""


def with_devices(config: Config, device: str) -> Config:
    """Replace `auto` by a device."""
    changes = {
        name: msgspec.structs.replace(section, device=device)
        for name, section in (("encode", config.encode), ("generate", config.generate))
        if section.device == AUTO
    }
    return msgspec.structs.replace(config, **changes)


def with_device_defaults(config: Config) -> Config:
    """Replace the zeros of keys whose default depends on the device."""
    generate, arena = config.generate, config.arena
    usual = CUDA_DEFAULTS if generate.on_cuda else CPU_DEFAULTS
    batch_tokens = generate.max_batch_tokens or usual.max_batch_tokens
    return msgspec.structs.replace(
        config,
        generate=msgspec.structs.replace(
            generate,
            max_batch_tokens=batch_tokens,
            # A smaller step, if configured, also limits the defaults below.
            slots=generate.slots or min(usual.slots, batch_tokens - 1),
            chunk_tokens=generate.chunk_tokens or min(usual.chunk_tokens, batch_tokens),
        ),
        arena=msgspec.structs.replace(
            arena,
            pixel_bytes=arena.pixel_bytes or usual.pixel_bytes,
            embedding_bytes=arena.embedding_bytes or usual.embedding_bytes,
        ),
    )


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
