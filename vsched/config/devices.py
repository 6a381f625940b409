"""Defaults that depend on a device: `device = "auto"`, and keys whose default is 0.

`settle` resolves what is certain without a GPU library; `vsched.devices` resolves the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from vsched.config.stages import AUTO, CPU

if TYPE_CHECKING:
    from vsched.config.sections import Config

DEVICE_FILES: tuple[str, ...] = (
    "/dev/nvidiactl",
    "/dev/nvidia0",
    "/proc/driver/nvidia",
    "/dev/dxg",
)
"""Files of NVIDIA's driver, also in containers, and of WSL. Without any of them, no CUDA device can be used."""
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


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


def with_devices(config: Config, encode: str, generate: str = "") -> Config:
    """Replace `auto` by concrete devices; both by the first if there is no second."""
    changes = {
        name: msgspec.structs.replace(section, device=device)
        for name, section, device in (
            ("encode", config.encode, encode),
            ("generate", config.generate, generate or encode),
        )
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
