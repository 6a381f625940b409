"""Any other language model in transformers: its properties, read from its configuration without torch.

Such a model runs as transformers' own modules, with the attention of `batching/paged_attention.py`. Unsupported models
are refused, here based on the configuration, otherwise when the model is built (`backends/reference/whole_model.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from vsched.errors import CheckpointError
from vsched_workers.families.recurrent import ATTENDING, NEITHER, STATEFUL, layer_kinds

LAYER_TYPES = ATTENDING | STATEFUL | NEITHER
"""Layer types that are supported."""

UNEQUAL = {
    "llama4_text": "temperatures that follow a token's place in the step",
}
"""Architectures whose output differs from transformers' `generate` in a comparison, with the reason."""

FROM_THE_BATCH = ("dynamic", "longrope")
"""Kinds of rotary embedding whose frequencies change once any sequence of a batch exceeds the original length."""


def read_config(directory: Path, family: str) -> Any:
    """Return transformers' configuration object of a checkpoint.

    Raises:
        CheckpointError: When transformers has no such architecture, or cannot read it.
    """
    import transformers

    if family not in transformers.CONFIG_MAPPING:
        raise CheckpointError(
            f"config.json: model_type {family!r} is not supported: transformers {transformers.__version__} lacks it, "
            "and code of a checkpoint is not run. Remedy: serve a checkpoint of a supported family; "
            "docs/models.md lists them."
        )
    try:
        return transformers.CONFIG_MAPPING[family].from_pretrained(
            str(directory), local_files_only=True
        )
    except Exception as error:
        # Whatever exception transformers' class raises, the configuration cannot be read.
        raise CheckpointError(
            f"config.json cannot be read as a configuration of {family!r} ({type(error).__name__}). "
            "Remedy: download the checkpoint again."
        ) from error


def text_config(directory: Path, family: str) -> Any:
    """Return transformers' configuration object of a language model on the generic path.

    Raises:
        CheckpointError: When it is not supported, with the reason.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = read_config(directory, family)
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        raise refusal(
            family, "a part for images or sound, which it shares with no supported family"
        )
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or config.is_encoder_decoder:
        raise refusal(family, "no decoder that writes text by itself")
    check_text(config, family)
    return config


def check_text(config: Any, family: str) -> None:
    """Check that a language model, alone or as a part of another model, is supported.

    Raises:
        CheckpointError: When it is not, with the reason.
    """
    if config.model_type in UNEQUAL:
        raise refusal(family, UNEQUAL[config.model_type])
    kinds = set(layer_kinds(config))
    others = sorted(kinds - LAYER_TYPES)
    if others:
        raise refusal(
            family,
            f"layers that keep more than keys and values, or attend otherwise ({', '.join(others)})",
        )
    if kinds and not kinds & ATTENDING:
        raise refusal(family, NO_ATTENTION)


OWN_ATTENTION = "attention of its own, which does not go through transformers' interface"
NO_ATTENTION = "no layer that attends, and so no KV cache to share out"


def refusal(family: str, what: str) -> CheckpointError:
    """Return the error that a model cannot be served."""
    return CheckpointError(
        f"config.json: model_type {family!r} has {what}, and cannot be served. "
        "Remedy: serve a checkpoint of a supported family; docs/models.md lists them."
    )


def context_tokens(config: Any, family: str) -> int:
    """Return the maximum length of a sequence.

    If rotary frequencies would change beyond an original length, for all sequences of a step at a time, it is that
    length.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        raise refusal(family, "no limit on its positions (max_position_embeddings)")
    rope = getattr(config, "rope_parameters", None) or {}
    # Some models have parameters for each layer type.
    tables = [each for each in rope.values() if isinstance(each, dict)] or [rope]
    for table in tables:
        if table.get("rope_type") in FROM_THE_BATCH:
            original = table.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            longest = min(longest, int(original or longest))
    return longest


class KeptValues(NamedTuple):
    """The number of key and value elements per token, and of their heads."""

    values: int
    heads: int


def kept_values(config: Any) -> KeptValues:
    """Return the sizes of all layers' keys and values per token.

    A rank compares them with the actual sizes before it serves.
    """
    count = sum(kind in ATTENDING for kind in layer_kinds(config)) or config.num_hidden_layers
    each = config.per_layer_config if getattr(config, "is_heterogeneous", False) else ()
    layers = [_kept_by_layer(layer) for layer in each] or [_kept_by_layer(config)] * count
    return KeptValues(sum(one.values for one in layers), sum(one.heads for one in layers))


def _kept_by_layer(config: Any) -> KeptValues:
    heads = config.num_attention_heads
    if getattr(
        config, "kv_lora_rank", None
    ):  # multi-head latent attention, with decompressed keys and values
        key = config.qk_nope_head_dim + config.qk_rope_head_dim
        return KeptValues(int(heads * (key + config.v_head_dim)), 2 * int(heads))
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "multi_query", False):
        kv_heads = 1
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KeptValues(int(2 * kv_heads * size), 2 * int(kv_heads))
