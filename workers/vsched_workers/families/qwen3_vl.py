"""Qwen3-VL: deepstack, so that a token has one embedding row, and one more for each deepstack level."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from vsched_workers.families.base import Family
from vsched_workers.families.decoder import Decoder, usual_sharing
from vsched_workers.families.sharing import Sharing, Split
from vsched_workers.families.video_processors import VIDEO_PROCESSORS, VideoProcessor

if TYPE_CHECKING:
    import torch
    from torch import nn


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
