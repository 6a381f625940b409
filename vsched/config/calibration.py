"""What makes calibration files, and whether those of the stages are of the checkpoint."""

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
    """A plug-in that can choose the scales of weights by what their inputs were for some texts and images."""

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
        """Run lines of text and RGB images, and write the file; return the layers of it."""
        ...

    def check_calibration(self, info: ModelInfo, file: str, *, stage: str) -> None:
        """Check a file for a stage without loading weights.

        Raises:
            CheckpointError: When it is of another checkpoint, or cannot be used.
        """
        ...


def check_calibration(config: Config, info: ModelInfo) -> None:
    """Check the files that the stages name, those of a stage that runs; no weights are read.

    Raises:
        ConfigError: When nothing is made into fewer bits, or the plug-in takes no such file.
        CheckpointError: When a file is of another checkpoint, or cannot be used.
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
                f"{stage}.calibration: the plug-in {section.plugin!r} takes no such file. "
                "Remedy: leave it empty."
            )
        plugin.check_calibration(info, section.calibration, stage=stage)
