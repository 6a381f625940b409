"""Choice of the stages' devices: `device = "auto"`, checks of CUDA devices, and the data type on them.

The worker plug-in reports the devices, once per process and from a child process, because this process must not load
CUDA. Without a device file of a GPU it is not called at all. Rejected: NVML, since only torch knows which drivers and
compute capabilities its build supports; a survey in the ranks, since limits and placement are needed before they start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import cache

import msgspec

from vsched.config import Config, LoadedConfig, resolve_policies
from vsched.config.checks import check_combinations
from vsched.config.devices import (
    PARTS,
    VISIBLE_DEVICES,
    DeviceChoice,
    is_open,
    settle,
    with_device_defaults,
    with_devices,
)
from vsched.config.sections import AUTO, CPU, StageConfig
from vsched.errors import ConfigError, VschedError
from vsched.memory import size_text
from vsched.types import ModelInfo
from vsched.worker.contract import CudaDevice, DeviceSurvey
from vsched.worker.memory import weights_bytes
from vsched.worker.registry import load_worker

logger = logging.getLogger(__name__)
SURVEY_S = 60.0
"""Limit on the survey, which imports torch and opens each device."""
ROOM_BYTES = 1 << 30
"""Free memory that a rank needs next to its weights: CUDA context, smallest steps and smallest KV cache."""


def resolve_loaded(loaded: LoadedConfig, *, only_serves: bool = False) -> LoadedConfig:
    """Choose the devices of a loaded configuration, whose checkpoint is a local folder.

    `only_serves` means that this process loads no model, which saves imports.

    Blocks: up to `SURVEY_S`, on a host with a GPU.

    Raises:
        ConfigError: As from `resolve_devices`, or if values do not fit together on these devices.
    """
    config, choice = resolve_devices(loaded.config, os.environ, only_serves=only_serves)
    if loaded.devices is not None and not choice.uses_cuda:  # it has the reason
        choice = loaded.devices
    check_combinations(config)
    return msgspec.structs.replace(
        loaded, config=config, policies=resolve_policies(config), devices=choice
    )


def resolve_devices(
    config: Config, environ: Mapping[str, str], *, only_serves: bool = False
) -> tuple[Config, DeviceChoice]:
    """Choose devices for stages with `auto`, check configured devices, and resolve all defaults; also say why.

    Blocks: up to `SURVEY_S`, on a host with a GPU or if a stage is configured for CUDA.

    Raises:
        ConfigError: If a configured device does not exist, or there are fewer usable devices than ranks.
    """
    config, choice = settle(config, environ)
    on_cuda = config.generate.on_cuda or config.encode.on_cuda
    if choice is not None and (config.cluster.elsewhere or not on_cuda):
        return config, choice
    survey = None
    if choice is None or config.model.dtype == "auto":  # it takes seconds
        survey = _survey(config.generate.plugin)
    if choice is not None and (survey is None or survey.failed):
        # The ranks check the configured devices.
        return config, DeviceChoice(text=_names(config, ()), uses_cuda=True)
    if survey is None:
        problem = f"worker plug-in {config.generate.plugin!r} does not report devices"
        survey = DeviceSurvey(problem=problem)
    return _assign(config, survey, _inspected(config, only_serves=only_serves), environ)


def log_devices(choice: DeviceChoice | None) -> None:
    """Log the devices in use; a warning if the host may have a GPU that is not used."""
    if choice is not None and (choice.missed or choice.uses_cuda):
        logger.log(logging.WARNING if choice.missed else logging.INFO, "%s", choice.text)


@cache
def _survey(plugin: str) -> DeviceSurvey | None:
    """Devices by the plug-in; None if it does not report them."""
    return load_worker(plugin).survey_devices(timeout_s=SURVEY_S)


def _inspected(config: Config, *, only_serves: bool) -> ModelInfo | None:
    """Facts of the checkpoint; None if it cannot be served, which the engine reports."""
    try:
        plugin = load_worker(config.generate.plugin, path="generate.plugin")
        if only_serves:
            plugin.forgo_models(config.model.path)
        return plugin.inspect(config.model.path, dtype=config.model.dtype, item_tokens_max=0)
    except VschedError:
        return None


def _assign(
    config: Config, survey: DeviceSurvey, info: ModelInfo | None, environ: Mapping[str, str]
) -> tuple[Config, DeviceChoice]:
    """Give the stages devices: the generate stage first, the encode stage devices of its own if there are enough."""
    encode, generate = config.encode, config.generate
    for name, section in (("generate", generate), ("encode", encode)):
        if section.on_cuda and section.replicas and not survey.failed:
            _check_configured(name, section, survey, environ)
    needed = _needed_bytes(config, info)
    problems = [_problem(device, needed) for device in survey.devices]
    usable = {index for index, problem in enumerate(problems) if not problem}
    missed = survey.problem or "; ".join(dict.fromkeys(filter(None, problems)))
    if not usable and is_open(config):
        config = with_device_defaults(with_devices(config, CPU))
        text = f"{_names(config, survey.devices)}, because no GPU can be used: {missed}"
        config = _with_dtype(config, survey, info)
        return config, DeviceChoice(text=text, missed=True)
    encodes = encode.replicas > 0 and (info is None or info.takes_images)
    taken = set(_indices(encode)) if encodes else set()
    if generate.device == AUTO:
        first = _first_run(usable - taken, _count(generate))
        if first is None:
            first = _first_run(usable, _count(generate))
        if first is None:
            raise _too_few("generate", generate, usable, missed, environ)
        generate = msgspec.structs.replace(generate, device=f"cuda:{first}")
    if encode.device == AUTO:
        encode = msgspec.structs.replace(encode, device=generate.device)
        own = _first_run(usable - {*_indices(generate)}, _count(encode)) if encodes else None
        if own is not None and config.placement != "together":
            encode = msgspec.structs.replace(encode, device=f"cuda:{own}")
        elif encodes and not usable.issuperset(_indices(encode)):
            raise _too_few("encode", encode, usable, missed, environ)
    config = msgspec.structs.replace(config, encode=encode, generate=generate)
    text = _names(config, survey.devices) + (f"; not used: {missed}" if missed else "")
    config = with_device_defaults(_with_dtype(config, survey, info))
    return config, DeviceChoice(text=text, uses_cuda=True)


def _check_configured(
    name: str, section: StageConfig, survey: DeviceSurvey, environ: Mapping[str, str]
) -> None:
    """Check that the configured devices of a stage exist."""
    last = max(_indices(section))
    if survey.problem or last >= len(survey.devices):
        there = survey.problem or _available(len(survey.devices), environ)
        raise ConfigError.of_limit(
            f"{name}.device: {_count(section)} ranks need the devices up to cuda:{last}",
            value=section.device,
            limit=there,
            remedy=f"set {name}.device to auto or cpu, or lower {name}.tensor_parallel or {name}.replicas",
        )
    for index in _indices(section):
        problem = survey.devices[index].problem
        if problem:
            raise ConfigError.of_limit(
                f"{name}.device: cannot be used",
                value=f"cuda:{index}",
                limit=problem,
                remedy=f"set {name}.device to auto or cpu",
            )


def _too_few(
    name: str,
    section: StageConfig,
    usable: set[int],
    missed: str,
    environ: Mapping[str, str],
) -> ConfigError:
    limit = _available(len(usable), environ) + (f" ({missed})" if missed else "")
    return ConfigError.of_limit(
        f"{name}.tensor_parallel: more ranks than consecutive CUDA devices that can be used",
        value=f"{section.replicas} x {section.tensor_parallel}",
        limit=limit,
        remedy=f"lower {name}.tensor_parallel or {name}.replicas, or set {name}.device to cpu",
    )


def _available(count: int, environ: Mapping[str, str]) -> str:
    visible = environ.get(VISIBLE_DEVICES)
    where = "" if visible is None else f" with {VISIBLE_DEVICES}={visible}"
    return f"{count} device" + "s" * (count != 1) + where


def _count(section: StageConfig) -> int:
    """Number of devices of a stage, one for each rank."""
    return section.replicas * section.tensor_parallel


def _indices(section: StageConfig) -> range:
    """Numbers of the devices of a stage; empty if they are not CUDA devices."""
    if not section.on_cuda:
        return range(0)
    first = int(section.device.partition(":")[2] or 0)
    return range(first, first + max(_count(section), 1))


def _first_run(usable: set[int], count: int) -> int | None:
    """First of `count` consecutive numbers in a set; None if there are none."""
    for first in sorted(usable):
        if usable.issuperset(range(first, first + count)):
            return first
    return None


def _needed_bytes(config: Config, info: ModelInfo | None) -> int:
    """Memory of a device with which a generate rank can start."""
    section = config.generate
    size = weights_bytes(config.model.path) * PARTS[section.weights]
    if info is not None and info.dtype == "float32" and config.model.dtype == "auto":
        size /= 2  # 16 bits on a device
    return int(size / section.tensor_parallel) + ROOM_BYTES


def _problem(device: CudaDevice, needed: int) -> str:
    """Reason why a device cannot hold a rank; empty if it can."""
    if device.problem:
        return f"{device.name}: {device.problem}"
    if device.total_bytes < needed:
        return (
            f"{device.name} has {size_text(device.total_bytes)}, and a rank needs {size_text(needed)}: share the model "
            "among more devices (--tensor-parallel-size), or quantize it (generate.weights)"
        )
    if device.free_bytes < needed:
        return (
            f"{device.name} has {size_text(device.free_bytes)} of {size_text(device.total_bytes)} free, and a rank "
            f"needs {size_text(needed)}: end other programs on it"
        )
    return ""


def _with_dtype(config: Config, survey: DeviceSurvey, info: ModelInfo | None) -> Config:
    """Replace a data type `auto` for which the devices of the generate stage have a better one."""
    indices = _indices(config.generate)
    if config.model.dtype != "auto" or info is None or not indices:
        return config
    bfloat16 = all(
        survey.devices[index].has_bfloat16 for index in indices if index < len(survey.devices)
    )
    wanted = "bfloat16" if bfloat16 else "float16"
    if info.dtype == "float32" or (info.dtype == "bfloat16" and not bfloat16):
        model = msgspec.structs.replace(config.model, dtype=wanted)
        return msgspec.structs.replace(config, model=model)
    return config


def _names(config: Config, devices: Sequence[CudaDevice]) -> str:
    """The devices of the stages in words, such as `generate on cuda:0 (NVIDIA H200, 140 GiB free)`."""
    parts: dict[str, list[str]] = {}
    for name, section in (("encode", config.encode), ("generate", config.generate)):
        if section.replicas:
            where = _described(section, devices) if section.on_cuda else section.device
            parts.setdefault(where, []).append(name)
    return ", ".join(f"{' and '.join(stages)} on {where}" for where, stages in parts.items())


def _described(section: StageConfig, devices: Sequence[CudaDevice]) -> str:
    indices = _indices(section)
    last = f" to cuda:{indices[-1]}" if len(indices) > 1 else ""
    first = indices[0]
    if first >= len(devices):
        return f"cuda:{first}{last}"
    free = min(device.free_bytes for device in devices[first : indices[-1] + 1])
    return f"cuda:{first}{last} ({devices[first].name}, {size_text(free)} free)"
