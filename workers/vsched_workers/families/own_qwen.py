"""Qwen2.5-VL with vsched's own modules, so that a rank does not import transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vsched_workers.families.qwen import Qwen25Vl, QwenSettings

if TYPE_CHECKING:
    from torch import nn


class OwnQwen25Vl(Qwen25Vl):
    """Qwen2.5-VL with vsched's own modules, for one checkpoint: a rank does not import transformers."""

    def __init__(self, settings: QwenSettings) -> None:
        """Take the settings from `config.json`."""
        self._settings = settings

    def model_config(self, path: str) -> QwenSettings:
        return self._settings

    def build_language(self, path: str, attention: str) -> nn.Module:
        from vsched_workers.families.own_modules import QwenLanguageModel

        return QwenLanguageModel(self._settings.text_config)

    def build_vision(self, path: str, attention: str) -> nn.Module:
        from vsched_workers.families.own_modules import QwenVisionTower

        return QwenVisionTower(self._settings.vision_config)
