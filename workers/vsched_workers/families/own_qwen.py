"""Qwen2.5-VL with vsched's own modules, so that a rank does not import transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vsched_workers.families.qwen import Qwen25Vl, QwenSettings, read_settings
from vsched_workers.families.qwen_image import grid_of, time_of
from vsched_workers.families.qwen_positions import Items, kept_rows

if TYPE_CHECKING:
    import torch
    from torch import nn


class OwnQwen25Vl(Qwen25Vl):
    """The family for one checkpoint that the modules support."""

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

    def encode(self, tower: nn.Module, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = tower(pixels, grids)
        return rows

    def positions(
        self, config: Any, token_ids: npt.NDArray[np.int32], items: Items
    ) -> tuple[npt.NDArray[np.int64], int]:
        vision = config.vision_config
        return positions_of(
            len(token_ids),
            items,
            merge=vision.spatial_merge_size,
            per_second=vision.tokens_per_second,
        )


def own_family(family: Qwen25Vl, path: str) -> OwnQwen25Vl | None:
    """Return the family with vsched's own modules for a checkpoint; None if transformers' are needed.

    Raises:
        CheckpointError: When `config.json` lacks a required entry.
    """
    settings = read_settings(path, family.text, family.vision)
    return None if settings is None else OwnQwen25Vl(settings)


def positions_of(
    length: int, items: Items, *, merge: int, per_second: float
) -> tuple[npt.NDArray[np.int64], int]:
    """Return mrope positions [3, length], and the delta to add to a later token's index.

    Text advances all axes by one per token. An image starts at the position after the text before it: the axes of its
    tokens are frame, row and column, and what follows starts after the longest of its sides. The frame groups of a
    video start at the same position, `per_second` times their time later on the first axis, and what follows starts
    after the longest of the spatial sides. Generated tokens follow the last token. Pruned tokens leave gaps.
    """
    positions = np.empty((3, length), dtype=np.int64)
    following = at = 0
    for place in items:
        text = place.offset - at
        positions[:, at : place.offset] = following + np.arange(text)
        following += text
        frames, rows, columns = grid_of(place.metadata)
        sides = (frames, rows // merge, columns // merge)
        at = place.runs[-1][1]
        longest = max(sides[1:])
        time = time_of(place.metadata)
        if time is not None and time[0]:
            following -= longest
        axes = np.indices(sides).reshape(3, -1)
        positions[:, place.offset : at] = following + axes[:, kept_rows(place)]
        if time is not None:
            # In float32 like the model's own code.
            interval = np.float32(per_second) * np.float32(time[1])
            positions[0, place.offset : at] += int(np.float32(time[0]) * interval)
        following += longest
    positions[:, at:] = following + np.arange(length - at)
    return positions, int(positions[:, -1].max()) + 1 - length
