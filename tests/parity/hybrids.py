"""The architectures with layers that keep a state, as in `architectures.py`, with state sizes of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_EVERY_OTHER = ["linear_attention", "full_attention"] * 2
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
_DELTA = {
    "layer_types": _EVERY_OTHER,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

_ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
}

HYBRIDS: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {
        **_LATENT,
        **_ROUTED_EXPERTS,
        "q_lora_rank": 24,
        "layer_types": _EVERY_OTHER,
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "attention"] * 2,
        "shared_intermediate_size": 64,
        "num_local_experts": 0,
    },
    "jamba": {
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {
        **_LATENT,
        **_ROUTED_EXPERTS,
        "q_lora_rank": None,
        "layer_types": _EVERY_OTHER,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 16},
    "lfm2_moe": {
        **_EXPERTS,
        "layer_types": ["conv", "full_attention"] * 2,
        "num_dense_layers": 1,
    },
    "lfm3": {},
    "minimax": {**_LOCAL_EXPERTS, "layer_types": _EVERY_OTHER, "block_size": 8},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
    },
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4},
    "qwen3_5_moe_text": {**_EXPERTS, "shared_expert_intermediate_size": 32, **_DELTA},
    "qwen3_5_text": _DELTA,
    "qwen3_next": {**_EXPERTS, "shared_expert_intermediate_size": 32, **_DELTA},
}
"""Configuration of a model of each `model_type`, in addition to `COMMON`."""
