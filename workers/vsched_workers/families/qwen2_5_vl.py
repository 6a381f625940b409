"""Qwen2.5-VL: windowed vision attention, one embedding row per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from vsched_workers.families.base import Family
from vsched_workers.families.decoder import Decoder, usual_sharing
from vsched_workers.families.sharing import Sharing, Split

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
