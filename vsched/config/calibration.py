"""Calibration of quantized weights: the plug-in protocol, and the check of configured files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from vsched.config.sections import Config
from vsched.errors import ConfigError
from vsched.types import ModelInfo
from vsched.worker.contract import Progress, WorkerSettings
from vsched.worker.registry import load_worker


@runtime_checkable
class Calibrates(Protocol):
    """A plug-in that can calibrate weight scales on sample texts and images."""

    def calibrate(
        self,
        info: ModelInfo,
        settings: WorkerSettings,
        file: str,
        progress: Progress,
        *,
        texts: Sequence[str],
        images: Sequence[Any],
    ) -> int:
        """Run lines of text and RGB images, write the file, and return the number of layers in it."""
        ...

    def check_calibration(self, info: ModelInfo, file: str, *, stage: str) -> None:
        """Check a file for a stage without loading weights.

        Raises:
            CheckpointError: If it belongs to another checkpoint, or cannot be used.
        """
        ...


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
        if not isinstance(plugin, Calibrates):
            raise ConfigError(
                f"{stage}.calibration: the plug-in {section.plugin!r} does not support calibration files. "
                "Remedy: leave it empty."
            )
        plugin.check_calibration(info, section.calibration, stage=stage)
