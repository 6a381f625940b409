"""The settings in a Qwen2.5-VL checkpoint's `config.json`, with the names of transformers' configuration objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

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
