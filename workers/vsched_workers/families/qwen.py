"""Qwen2.5-VL, with windowed vision attention, and Qwen3-VL, with deepstack, also with a mixture of experts.

With deepstack a token has one embedding row, and one more for each deepstack level. The settings in a Qwen2.5-VL
checkpoint's `config.json` have the names of transformers' configuration objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from vsched_workers.families.base import Family
from vsched_workers.families.decoders import Decoder, usual_sharing
from vsched_workers.families.sharing import Sharing, Split
from vsched_workers.families.text_settings import SIZES, TextSettings
from vsched_workers.families.video_processors import VIDEO_PROCESSORS, VideoProcessor

if TYPE_CHECKING:
    import torch
    from torch import nn


class Qwen25Vl(Family):
    """The family `qwen2_5_vl`."""

    name: ClassVar[str] = "qwen2_5_vl"
    library_prefix: ClassVar[str] = "Qwen2_5_VL"
    vision_class: ClassVar[str] = "Qwen2_5_VisionTransformerPretrainedModel"
    decoder: ClassVar[Decoder] = Decoder(axes=True)
    language_prefixes: ClassVar[tuple[str, ...]] = ("model.language_model.", "model.")
    vision_prefixes: ClassVar[tuple[str, ...]] = ("model.visual.", "visual.")
    text_defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 32768,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 29568,
        "use_sliding_window": False,
    }
    vision_defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "num_heads": 16,
    }
    language_sharing: ClassVar[Sharing] = replace(
        usual_sharing(decoder), counts={"layers.*.self_attn": ("num_heads", "num_key_value_heads")}
    )
    vision_sharing: ClassVar[Sharing] = Sharing(
        linears={
            "blocks.*.attn.qkv": Split.FUSED,
            "blocks.*.attn.proj": Split.ROW,
            "blocks.*.mlp.gate_proj": Split.COLUMN,
            "blocks.*.mlp.up_proj": Split.COLUMN,
            "blocks.*.mlp.down_proj": Split.ROW,
            "merger.mlp.0": Split.COLUMN,
            "merger.mlp.2": Split.ROW,
        },
        counts={"blocks.*.attn": ("num_heads",)},
        sizes=("num_heads", "hidden_size", "intermediate_size"),
    )

    def unsupported(self, config: Mapping[str, Any]) -> str | None:
        return "sliding windows" if self.text(config, "use_sliding_window") else None

    def head_dim(self, config: Mapping[str, Any]) -> int:
        return int(self.text(config, "hidden_size")) // int(
            self.text(config, "num_attention_heads")
        )

    def embedding_levels(self, config: Mapping[str, Any]) -> int:
        return 1

    def encode(self, tower: nn.Module, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = tower(pixels, grid_thw=grids).pooler_output
        return rows


class Qwen3Vl(Family):
    """The family `qwen3_vl`."""

    name: ClassVar[str] = "qwen3_vl"
    library_prefix: ClassVar[str] = "Qwen3VL"
    vision_class: ClassVar[str] = "Qwen3VLVisionModel"
    decoder: ClassVar[Decoder] = Decoder(axes=True, query_norm="q_norm", key_norm="k_norm")
    language_prefixes: ClassVar[tuple[str, ...]] = ("model.language_model.",)
    vision_prefixes: ClassVar[tuple[str, ...]] = ("model.visual.",)
    text_defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 128000,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 22016,
        "head_dim": 128,
    }
    vision_defaults: ClassVar[Mapping[str, Any]] = {
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "deepstack_visual_indexes": (8, 16, 24),
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
    }
    language_sharing: ClassVar[Sharing] = usual_sharing(decoder)
    vision_sharing: ClassVar[Sharing] = Sharing(
        linears={
            "blocks.*.attn.qkv": Split.FUSED,
            "blocks.*.attn.proj": Split.ROW,
            "blocks.*.mlp.linear_fc1": Split.COLUMN,
            "blocks.*.mlp.linear_fc2": Split.ROW,
            "merger.linear_fc1": Split.COLUMN,
            "merger.linear_fc2": Split.ROW,
            "deepstack_merger_list.*.linear_fc1": Split.COLUMN,
            "deepstack_merger_list.*.linear_fc2": Split.ROW,
        },
        counts={"blocks.*.attn": ("num_heads",)},
        sizes=("num_heads", "hidden_size", "intermediate_size"),
    )

    writes_timestamps: ClassVar[bool] = True
    video_processor: ClassVar[VideoProcessor] = VIDEO_PROCESSORS["Qwen3VLVideoProcessor"]

    def head_dim(self, config: Mapping[str, Any]) -> int:
        return int(self.text(config, "head_dim"))

    def embedding_levels(self, config: Mapping[str, Any]) -> int:
        return 1 + len(self.vision(config, "deepstack_visual_indexes"))

    def encode(self, tower: nn.Module, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        import torch

        out = tower(pixels, grid_thw=grids)
        return torch.cat([out.pooler_output, *out.deepstack_features], dim=-1)


class Qwen3VlMoe(Qwen3Vl):
    """The family `qwen3_vl_moe`, with the vision tower of `qwen3_vl`."""

    name: ClassVar[str] = "qwen3_vl_moe"
    library_prefix: ClassVar[str] = "Qwen3VLMoe"
    vision_class: ClassVar[str] = "Qwen3VLMoeVisionModel"
    decoder: ClassVar[Decoder] = replace(Qwen3Vl.decoder, experts=True)
    text_defaults: ClassVar[Mapping[str, Any]] = {
        "max_position_embeddings": 128000,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "head_dim": 0,
        "num_experts": 60,
    }
    language_sharing: ClassVar[Sharing] = Sharing(
        linears=Qwen3Vl.language_sharing.linears,
        absent=[name for name in Qwen3Vl.language_sharing.linears if ".mlp." in name],
        experts="layers.*.mlp.experts",
        sizes=(*Qwen3Vl.language_sharing.sizes, "num_experts"),
    )
    flips: ClassVar[tuple[str, ...]] = ("layers.*.mlp.experts.*",)

    def text(self, config: Mapping[str, Any], key: str) -> Any:
        part = config.get("text_config")
        if key == "num_experts" and isinstance(part, Mapping) and "num_local_experts" in part:
            return part["num_local_experts"]  # its name in newer versions of transformers
        return super().text(config, key)

    def head_dim(self, config: Mapping[str, Any]) -> int:
        stated = int(self.text(config, "head_dim"))
        return stated or int(self.text(config, "hidden_size")) // int(
            self.text(config, "num_attention_heads")
        )


_THETA = 1_000_000.0
_PLAIN_ROPE = {"default", "mrope"}
"""Names of the unscaled rotary embedding in configurations."""


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

    text_config: TextSettings
    vision_config: QwenVisionSettings
    tie_word_embeddings: bool

    def get_text_config(self) -> TextSettings:
        """Return the text part."""
        return self.text_config


def read_settings(family: Qwen25Vl, path: str) -> QwenSettings | None:
    """Return a checkpoint's settings; None if they are incomplete, or vsched's own modules do not support them.

    Raises:
        CheckpointError: When a required entry is missing.
    """
    config: dict[str, Any] = json.loads(Path(path, "config.json").read_bytes())
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
    sizes: dict[str, Any] = {name: int(family.text(config, name)) for name in SIZES}
    return QwenSettings(
        text_config=TextSettings(
            **sizes,
            head_dim=family.head_dim(config),
            rms_norm_eps=float(part["rms_norm_eps"]),
            rope_parameters=rope,
        ),
        vision_config=QwenVisionSettings(
            **{name: int(family.vision(config, name)) for name in _VISION_SIZES},
            fullatt_block_indexes=tuple(sees["fullatt_block_indexes"]),
            rope_theta=float(seen_rope.get("rope_theta", 10_000.0)),
            tokens_per_second=float(sees.get("tokens_per_second", 4)),
        ),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


_VISION_SIZES = [field.name for field in fields(QwenVisionSettings) if field.type == "int"]
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
