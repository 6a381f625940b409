"""The architectures that are compared, each as small as its features allow: four layers, 64 wide, 300 tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from vsched_workers.checkpoint import random_init

WINDOW = 9
"""Shorter than the prompts, and no multiple of a block or a chunk."""
ALTERNATING = ["sliding_attention", "full_attention"] * 2
COMMON: Mapping[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.35,
    "tie_word_embeddings": False,  # tied ones repeat the last token, whatever attention does
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED_EXPERTS |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
LATENT |= {"num_key_value_heads": 4, "head_dim": 8}
_WINDOWS = {"sliding_window": WINDOW, "layer_types": ALTERNATING}
_QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
SHARED_KV = {
    **_WINDOWS,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 300,
}
_ALL_HEADS = {"num_key_value_heads": 4}
_GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512, **_ALL_HEADS}

_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0}
_YARN |= {"original_max_position_embeddings": 16, "max_position_embeddings": 512}
_YARN |= {"beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1}
_EVERY_OTHER = ["linear_attention", "full_attention"] * 2
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
DELTA = {"layer_types": _EVERY_OTHER, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}

_STATEFUL: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {**LATENT, **ROUTED_EXPERTS, "num_experts": 4, "q_lora_rank": 24}
    | {"layer_types": _EVERY_OTHER},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"] * 2}
    | {"shared_intermediate_size": 64, "num_local_experts": 0},
    "jamba": {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
    | {"mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False},
    "kimi_linear": {**LATENT, **ROUTED_EXPERTS, "num_experts": 4, "q_lora_rank": None}
    | {"layer_types": _EVERY_OTHER, "linear_num_heads": 4, "linear_head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 16},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "lfm3": {},
    "minimax": {**_LOCAL_EXPERTS, "layer_types": _EVERY_OTHER, "block_size": 8},
    "nemotron_h": {
        **{key: value for key, value in ROUTED_EXPERTS.items() if key != "first_k_dense_replace"},
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "moe_shared_expert_intermediate_size": 32,
    }
    | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16}
    | {"n_groups": 2, "chunk_size": 8},
    "olmo_hybrid": {**DELTA, "linear_num_key_heads": 4},
    "qwen3_5_moe_text": {**EXPERTS, "shared_expert_intermediate_size": 32, **DELTA},
    "qwen3_5_text": DELTA,
    "qwen3_next": {**EXPERTS, "shared_expert_intermediate_size": 32, **DELTA},
}
"""The architectures with layers that keep a state."""

ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {**EXPERTS, "num_dense_layers": 1, **_WINDOWS},
    "apertus": {},
    "arcee": {},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "biogpt": _ALL_HEADS,
    "bitnet": {},
    "cohere": {},
    "cohere2": _WINDOWS,
    "cohere2_moe": {**_WINDOWS, **EXPERTS},
    "cwm": {"sliding_window": WINDOW, "layer_types": ALTERNATING},
    "deepseek_v2": {**LATENT, **ROUTED_EXPERTS, "q_lora_rank": None},
    "deepseek_v3": {**LATENT, **ROUTED_EXPERTS, "q_lora_rank": 24},
    "dots1": {**ROUTED_EXPERTS, "n_shared_experts": 1, "routed_scaling_factor": 1.0},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}
    | {"moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 3},
    "exaone4": {**_WINDOWS, "sliding_window_pattern": 2},
    "exaone_moe": {**_WINDOWS, **EXPERTS},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "flint": {**_WINDOWS, **EXPERTS, "shared_expert_intermediate_size": 32},
    "gemma": {},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_WINDOWS, "query_pre_attn_scalar": 16},
    "gemma3n_text": {**SHARED_KV, "altup_num_inputs": 2, "laurel_rank": 8}
    | {"activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {**SHARED_KV, "global_head_dim": 32, "num_global_key_value_heads": 1},
    "gemma4_unified_text": _WINDOWS,
    "glm": {},
    "glm4": {},
    "glm4_moe": ROUTED_EXPERTS,
    "glm4_moe_lite": {**LATENT, **ROUTED_EXPERTS, "q_lora_rank": 24},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": _ALL_HEADS,
    "gpt_oss": {**_LOCAL_EXPERTS, **_WINDOWS},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.4}
    | {"attention_multiplier": 0.2, "logits_scaling": 4.0},
    "granite_swa": _WINDOWS,
    "granitemoe": _LOCAL_EXPERTS,
    "granitemoe_swa": {**_WINDOWS, **_LOCAL_EXPERTS},
    "granitemoeshared": {**_LOCAL_EXPERTS, "shared_intermediate_size": 32},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hy_v3": EXPERTS,
    "hyperclovax": {},
    "internlm3": {},
    "iquestcoder": {},
    "jais2": {},
    "kolibri1": {**_LOCAL_EXPERTS, "sliding_window": WINDOW, "shared_expert_intermediate_size": 32},
    "laguna": {**_WINDOWS, **EXPERTS, "shared_expert_intermediate_size": 32},
    "llama": {},
    "longcat_flash": {**LATENT, "q_lora_rank": 24, "n_routed_experts": 4, "moe_topk": 2}
    | {"num_layers": 4, "expert_ffn_hidden_size": 32, "ffn_hidden_size": 96},
    "mellum": {**_WINDOWS, **_LOCAL_EXPERTS},
    "minicpm3": {**LATENT, "q_lora_rank": 24},
    "minimax_m2": {**_LOCAL_EXPERTS, "rotary_dim": 8},
    "ministral": _WINDOWS,
    "ministral3": {"rope_parameters": _YARN},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": _LOCAL_EXPERTS,
    "modernbert-decoder": {**_ALL_HEADS, "local_attention": WINDOW},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOWS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, **_ALL_HEADS},
    "persimmon": _ALL_HEADS,
    "phi": {},
    "phi3": {"sliding_window": WINDOW, "partial_rotary_factor": 1.0},
    "phimoe": {**_LOCAL_EXPERTS, "sliding_window": WINDOW},
    "qwen2": _QWEN_WINDOWS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": _QWEN_WINDOWS,
    "qwen3_moe": EXPERTS,
    "seed_oss": {},
    "smollm3": {"no_rope_layer_interval": 2, "no_rope_layers": [1, 0, 1, 0]},
    "solar_open": ROUTED_EXPERTS,
    "stablelm": {},
    "starcoder2": {"sliding_window": WINDOW},
    "vaultgemma": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "youtu": {**LATENT, "q_lora_rank": 24},
    **_STATEFUL,
}
"""Configuration of a model of each `model_type`, in addition to `COMMON`."""

REFUSED: Mapping[str, Mapping[str, Any]] = {
    "bloom": {"n_layer": 4, "n_head": 4},
    "codegen": {**_ALL_HEADS, "rotary_dim": 8},
    "deepseek_v32": {**LATENT, **ROUTED_EXPERTS, "q_lora_rank": 24}
    | {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16},
    "diffllama": {},
    "doge": {},
    "falcon": {"num_kv_heads": 2},
    "gpt_neo": {**_ALL_HEADS, "num_layers": 4, "window_size": WINDOW}
    | {"attention_types": [[["global", "local"], 2]]},
    "gpt_neox_japanese": {"intermediate_multiple_size": 2},
    "gptj": {**_ALL_HEADS, "rotary_dim": 8},
    "llama4_text": {**_LOCAL_EXPERTS, "attention_chunk_size": 16}
    | {"intermediate_size_mlp": 64, "interleave_moe_layer_step": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 4},
    "recurrent_gemma": {},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_mem_blocks": 1},
    "zaya": {},
}
"""Architectures that are refused before weights are read."""

FAMILY_SIZES = {"qwen2_5_vl": "nano25", "qwen3_vl": "nano3", "qwen3_vl_moe": "nano3moe"}
"""Families with a path of their own, each with the size of its smallest checkpoint; here only for text."""

SAMPLE = (
    *("deepseek_v3", "gemma2", "gpt2", "gpt_oss", "llama", "phi3", "qwen3_moe", "stablelm"),
    *("bamba", "jamba", "lfm2", "minimax", "qwen3_next"),
)
"""A choice with all features: latent attention, soft caps, learned positions, sinks, windows, experts; and states: of
Mamba 2 and 1, a convolution alone, lightning attention, the gated delta rule."""


def make_checkpoint(name: str, directory: Path, **changes: Any) -> None:
    """Write a checkpoint of random float32 weights, with a tokenizer of bytes; `changes` are to its configuration."""
    if name in FAMILY_SIZES:
        random_init.make_checkpoint(str(directory), FAMILY_SIZES[name], dtype="float32")
        return
    options = {**COMMON, **ARCHITECTURES.get(name, {}), **REFUSED.get(name, {}), **changes}
    if name == "falcon":
        del options["head_dim"]  # a property in this class
    config = CONFIG_MAPPING[name](**options)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    # Parameters that are zero or one by default (norms, biases, sinks) get random offsets, so that errors show.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() <= 1:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    model.save_pretrained(directory)
    byte_tokenizer(CHAT_TEMPLATE).save_pretrained(directory)


def byte_tokenizer(
    template: str,
    *,
    merges: Sequence[tuple[str, str]] = (),
    special: Mapping[str, str] | None = None,
) -> Any:
    """Return a tokenizer of bytes, with some merges and special tokens by their names."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    every = ["<pad>", "<s>", "</s>", *alphabet, *(one + other for one, other in merges)]
    words = {word: index for index, word in enumerate(every)}
    backend = Tokenizer(models.BPE(vocab=words, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not merges)
    backend.decoder = decoders.ByteLevel()
    named = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    make: Any = PreTrainedTokenizerFast
    made = make(tokenizer_object=backend, **named, extra_special_tokens=dict(special or {}))
    made.chat_template = template
    return made
