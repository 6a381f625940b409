"""Families with vsched's own modules, for one checkpoint each, so that a rank does not import transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vsched_workers.families.decoders import DECODERS, Decoder, TextFamily
from vsched_workers.families.qwen import Qwen25Vl, QwenSettings
from vsched_workers.families.text_settings import TextSettings, read_text_settings

if TYPE_CHECKING:
    from torch import nn


class OwnQwen25Vl(Qwen25Vl):
    """Qwen2.5-VL."""

    own_modules = True

    def __init__(self, settings: QwenSettings) -> None:
        """Take the settings from `config.json`."""
        self._settings = settings

    def model_config(self, path: str) -> QwenSettings:
        return self._settings

    def build_language(self, path: str, attention: str) -> nn.Module:
        from vsched_workers.families.own_modules import DecoderModel

        return DecoderModel(self._settings.text_config)

    def build_vision(self, path: str, attention: str) -> nn.Module:
        from vsched_workers.families.own_modules import QwenVisionTower

        return QwenVisionTower(self._settings.vision_config)


class OwnText(TextFamily):
    """A text model."""

    own_modules = True

    def __init__(self, name: str, decoder: Decoder, settings: TextSettings) -> None:
        """Take the `model_type`, its description, and the settings from `config.json`."""
        super().__init__(name, decoder)
        self._settings = settings

    def model_config(self, path: str) -> TextSettings:
        return self._settings

    def build_language(self, path: str, attention: str) -> nn.Module:
        from vsched_workers.families.own_modules import DecoderModel

        return DecoderModel(self._settings)


def own_text(name: str, path: str) -> OwnText | None:
    """Return the family of a checkpoint; None if vsched's own modules do not support it, or it cannot be read."""
    try:
        config = json.loads(Path(path, "config.json").read_bytes())
    except (OSError, ValueError):
        return None  # transformers reports the error
    settings = read_text_settings(name, config) if isinstance(config, Mapping) else None
    return None if settings is None else OwnText(name, DECODERS[name], settings)
