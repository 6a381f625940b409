"""Check of the configured calibration files."""

from __future__ import annotations

from vsched.config.sections import Config
from vsched.errors import ConfigError
from vsched.types import ModelInfo
from vsched.worker.registry import load_worker


def check_calibration(config: Config, info: ModelInfo) -> None:
    """Check the calibration files of the active stages, without reading weights.

    Raises:
        ConfigError: If the weights are not quantized, or the plug-in does not support calibration files.
        CheckpointError: If a file belongs to another checkpoint, or cannot be used.
    """
    for stage, section in (("generate", config.generate), ("encode", config.encode)):
        if not section.calibration or not section.replicas:
            continue
        if section.weights == "auto":
            raise ConfigError(
                f"{stage}.calibration: {section.calibration}, but {stage}.weights is auto, so no scales are chosen. "
                f"Remedy: set {stage}.weights to int8 or int4, or leave {stage}.calibration empty."
            )
        plugin = load_worker(section.plugin, path=f"{stage}.plugin")
        plugin.check_calibration(info, section.calibration, stage=stage)
