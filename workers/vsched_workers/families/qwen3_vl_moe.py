"""Qwen3-VL with a mixture of experts in the language model's feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vsched_workers.families.decoder import Decoder
from vsched_workers.families.qwen3_vl import Qwen3Vl
from vsched_workers.families.sharing import Sharing


class Qwen3VlMoe(Qwen3Vl):
    """The family `qwen3_vl_moe`, with the vision tower of `qwen3_vl`."""

    name: ClassVar[str] = "qwen3_vl_moe"
    library_prefix: ClassVar[str] = "Qwen3VLMoe"
    vision_class: ClassVar[str] = "Qwen3VLMoeVisionModel"
    decoder: ClassVar[Decoder] = Decoder(axes=True, experts=True)
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
