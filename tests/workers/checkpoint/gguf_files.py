"""Writing of GGUF files."""

from __future__ import annotations

import json
from typing import Any


def add_sizes(writer: Any, config: Any, *, context: int) -> None:
    """Write the sizes of a decoder-only model with this configuration to a `gguf.GGUFWriter`."""
    writer.add_context_length(context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def write_to_file(writer: Any) -> None:
    """Write and close the file of a `gguf.GGUFWriter`."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: Any, tokenizer: Any, *, pre: str, end: str) -> None:
    """Write a tokenizer to a `gguf.GGUFWriter`, with the name of its pre-tokenizer and its end token."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    special = {one["content"] for one in content["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(vocabulary["<|im_start|>"])
    writer.add_eos_token_id(vocabulary[end])
