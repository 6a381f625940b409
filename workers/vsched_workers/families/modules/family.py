"""Qwen2.5-VL by modules of its own, so that a rank does without transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vsched_workers.families.base import Items
from vsched_workers.families.modules.settings import QwenSettings, read_settings
from vsched_workers.families.qwen2_5_vl import Qwen25Vl
from vsched_workers.families.qwen_image import grid_of

if TYPE_CHECKING:
    import torch
    from torch import nn


class OwnQwen25Vl(Qwen25Vl):
    """The family for one checkpoint that is within what the modules can do."""

    def __init__(self, settings: QwenSettings) -> None:
        """Take what `config.json` says."""
        self._settings = settings

    def model_config(self, path: str) -> QwenSettings:
        return self._settings

    def build_language(self, path: str, attention: str) -> nn.Module:
        from vsched_workers.families.modules.language import QwenLanguageModel

        return QwenLanguageModel(self._settings.text_config)

    def build_vision(self, path: str, attention: str) -> nn.Module:
        from vsched_workers.families.modules.vision import QwenVisionTower

        return QwenVisionTower(self._settings.vision_config)

    def encode(self, tower: nn.Module, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = tower(pixels, grids)
        return rows

    def positions(
        self, config: Any, token_ids: npt.NDArray[np.int32], items: Items
    ) -> tuple[npt.NDArray[np.int64], int]:
        return positions_of(len(token_ids), items, merge=config.vision_config.spatial_merge_size)


def own_modules(family: Qwen25Vl, path: str) -> OwnQwen25Vl | None:
    """Return the family by its own modules for a checkpoint; None where transformers' are needed.

    Raises:
        CheckpointError: When `config.json` leaves out what has no default.
    """
    settings = read_settings(path, family.text, family.vision)
    return None if settings is None else OwnQwen25Vl(settings)


def positions_of(length: int, items: Items, *, merge: int) -> tuple[npt.NDArray[np.int64], int]:
    """Return M-RoPE positions [3, length], and the delta to add to a later token's index.

    Text advances all axes by one a token. An image starts where the text before it ended: its tokens have their frame,
    row and column on the axes, and what follows starts behind the longest of its sides.
    """
    positions = np.empty((3, length), dtype=np.int64)
    following = at = 0
    for place in items:
        text = place.offset - at
        positions[:, at : place.offset] = following + np.arange(text)
        following += text
        frames, rows, columns = grid_of(place.metadata)
        sides = (frames, rows // merge, columns // merge)
        at = place.offset + place.tokens
        positions[:, place.offset : at] = following + np.indices(sides).reshape(3, -1)
        following += max(sides[1:])
    positions[:, at:] = following + np.arange(length - at)
    return positions, following - at
