"""Writing of GGUF files."""

from __future__ import annotations

import json
from typing import Any


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
