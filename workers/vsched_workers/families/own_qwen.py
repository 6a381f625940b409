"""The settings in a Qwen2.5-VL checkpoint's `config.json`, with the names of transformers' configuration objects.

Qwen2.5-VL with vsched's own modules, so that a rank does not import transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from vsched_workers.families.qwen import Qwen25Vl
from vsched_workers.families.qwen_image import grid_of, time_of
from vsched_workers.families.qwen_positions import Items, kept_rows

if TYPE_CHECKING:
    import torch
    from torch import nn


_THETA = 1_000_000.0
_PLAIN_ROPE = {"default", "mrope"}
"""Names of the unscaled rotary embedding in configurations."""


@dataclass(frozen=True, kw_only=True)
class QwenTextSettings:
    """The text part; each field is an entry of it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    hidden_act: str = "silu"
    sliding_window: int | None = None

    @property
    def head_dim(self) -> int:
        """The head dimension."""
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True, kw_only=True)
class QwenVisionSettings:
    """The vision part; each field is an entry of it."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    window_size: int
    out_hidden_size: int
    fullatt_block_indexes: Sequence[int]
    rope_theta: float
    tokens_per_second: float = 4


@dataclass(frozen=True, kw_only=True)
class QwenSettings:
    """The whole model."""

    text_config: QwenTextSettings
    vision_config: QwenVisionSettings
    tie_word_embeddings: bool

    def get_text_config(self) -> QwenTextSettings:
        """Return the text part."""
        return self.text_config


def read_settings(
    path: str,
    text: Callable[[Mapping[str, Any], str], Any],
    vision: Callable[[Mapping[str, Any], str], Any],
) -> QwenSettings | None:
    """Return a checkpoint's settings; None if they are incomplete, or the modules here do not support them.

    `text` and `vision` read an entry of a part, as the family does.

    Raises:
        CheckpointError: When a required entry is missing.
    """
    config: dict[str, Any] = msgspec.json.decode(Path(path, "config.json").read_bytes())
    rope = _rope(config)
    part = config.get("text_config")
    part = part if isinstance(part, Mapping) else config
    sees = config.get("vision_config")
    if rope is None or not isinstance(sees, Mapping):
        return None
    if part.get("hidden_act") != "silu" or part.get("use_sliding_window"):
        return None
    if sees.get("hidden_act", "silu") != "silu" or not sees.keys() >= _VISION_STATED:
        return None
    if part.get("rms_norm_eps") is None:
        return None
    seen_rope = sees.get("rope_parameters") or {}
    text_sizes: dict[str, Any] = {name: int(text(config, name)) for name in _TEXT_SIZES}
    vision_sizes: dict[str, Any] = {name: int(vision(config, name)) for name in _VISION_SIZES}
    return QwenSettings(
        text_config=QwenTextSettings(
            **text_sizes,
            rms_norm_eps=float(part["rms_norm_eps"]),
            rope_parameters=rope,
        ),
        vision_config=QwenVisionSettings(
            **vision_sizes,
            fullatt_block_indexes=tuple(sees["fullatt_block_indexes"]),
            rope_theta=float(seen_rope.get("rope_theta", 10_000.0)),
            tokens_per_second=float(sees.get("tokens_per_second", 4)),
        ),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


_TEXT_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_VISION_SIZES = (
    "depth",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "in_channels",
    "patch_size",
    "temporal_patch_size",
    "spatial_merge_size",
    "window_size",
    "out_hidden_size",
)
_VISION_STATED = {"depth", "window_size", "out_hidden_size", "fullatt_block_indexes"}


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the rotary embedding parameters, in the newer layout or the older; None for unsupported kinds."""
    part = config.get("text_config")
    part = part if isinstance(part, Mapping) else config
    found = part.get("rope_scaling") or part.get("rope_parameters")
    if not isinstance(found, Mapping) or "mrope_section" not in found:
        return None
    if found.get("rope_type", found.get("type")) not in _PLAIN_ROPE:
        return None
    if found.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    theta = found.get("rope_theta", part.get("rope_theta", _THETA))
    sections = list(found["mrope_section"])
    return {"rope_type": "default", "rope_theta": float(theta), "mrope_section": sections}


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


def own_modules(family: Qwen25Vl, path: str) -> OwnQwen25Vl | None:
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
