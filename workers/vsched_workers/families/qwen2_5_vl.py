"""Qwen2.5-VL: windowed vision attention, one embedding row per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from vsched_workers.families.base import Family, Items
from vsched_workers.families.decoder import Decoder
from vsched_workers.families.qwen_image import ResizeLimits
from vsched_workers.families.qwen_positions import rope_positions
from vsched_workers.families.qwen_worst import largest_units
from vsched_workers.families.sharing import Sharing, Split

if TYPE_CHECKING:
    import torch
    from torch import nn


class Qwen25Vl(Family):
    """The family `qwen2_5_vl`."""

    name: ClassVar[str] = "qwen2_5_vl"
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
    language_sharing: ClassVar[Sharing] = Sharing(
        linears={
            "layers.*.self_attn.[qkv]_proj": Split.COLUMN,
            "layers.*.self_attn.o_proj": Split.ROW,
            "layers.*.mlp.gate_proj": Split.COLUMN,
            "layers.*.mlp.up_proj": Split.COLUMN,
            "layers.*.mlp.down_proj": Split.ROW,
        },
        counts={"layers.*.self_attn": ("num_heads", "num_key_value_heads")},
        sizes=("num_attention_heads", "num_key_value_heads", "intermediate_size"),
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

    def model_config(self, path: str) -> Any:
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig

        return Qwen2_5_VLConfig.from_pretrained(path, local_files_only=True)

    def build_language(self, path: str, attention: str) -> nn.Module:
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

        config = self.model_config(path).text_config
        config._attn_implementation = attention  # noqa: SLF001  # as transformers sets it
        return Qwen2_5_VLTextModel(config)

    def build_vision(self, path: str, attention: str) -> nn.Module:
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
            Qwen2_5_VisionTransformerPretrainedModel,
        )

        config = self.model_config(path).vision_config
        config._attn_implementation = attention  # noqa: SLF001
        return Qwen2_5_VisionTransformerPretrainedModel(config)

    def encode(self, tower: nn.Module, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = tower(pixels, grid_thw=grids).pooler_output
        return rows

    def largest_units(
        self, limits: ResizeLimits, *, factor: int, tokens_max: int, pixels_max: int
    ) -> dict[int, int]:
        return largest_units(limits, factor=factor, tokens_max=tokens_max, pixels_max=pixels_max)

    def positions(
        self, config: Any, token_ids: npt.NDArray[np.int32], items: Items
    ) -> tuple[npt.NDArray[np.int64], int]:
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

        return rope_positions(Qwen2_5_VLModel, config, token_ids, items)
