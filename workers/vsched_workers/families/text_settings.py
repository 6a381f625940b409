"""The settings of text models in `config.json`, read without transformers, for vsched's own modules.

These support a configuration that states all sizes and nothing unusual. Defaults are those of transformers'
configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vsched_workers.families.decoders import DECODERS

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
"""Sizes in `config.json`."""

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Parameters of Llama 3's scaled rotary embedding."""


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """A language model; fields have the names of transformers' configuration, unless described here.

    Attributes:
        qkv_bias: Whether query, key and value projections have a bias; `out_bias` of attention's output projection.
        feed_forward_bias: The same for the feed-forward.
        head_norms: Whether each query and key head is normalized.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    tie_word_embeddings: bool = False
    qkv_bias: bool = True
    out_bias: bool = False
    feed_forward_bias: bool = False
    head_norms: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = None

    def get_text_config(self) -> TextSettings:
        """Return itself, like a text model's configuration in transformers."""
        return self


def read_text_settings(name: str, config: Mapping[str, Any]) -> TextSettings | None:
    """Return the settings in a `config.json`; None if vsched's own modules do not support them."""
    bias = bool(config.get("attention_bias"))
    biases = {
        "llama": (bias, bias, bool(config.get("mlp_bias"))),
        "mistral": (False, False, False),
        "qwen2": (True, False, False),
        "qwen3": (bias, bias, False),
    }
    eps, rope = config.get("rms_norm_eps"), _rope(config)
    if (
        name not in biases
        or rope is None
        or not all(_is_size(config.get(key)) for key in SIZES)
        or not isinstance(eps, float)
        or config.get("hidden_act") != "silu"
        or _has_windows(name, config)
        or config.get("partial_rotary_factor", 1.0) != 1.0
        or any(config.get(key) for key in ("per_layer_config", "is_encoder_decoder"))
        or any(key in config for key in ("vision_config", "audio_config"))
        or config["hidden_size"] % config["num_attention_heads"]
        or config["num_attention_heads"] % config["num_key_value_heads"]
    ):
        return None
    head_dim: Any = config.get("head_dim")
    if head_dim is None and name != "qwen3":
        head_dim = config["hidden_size"] // config["num_attention_heads"]
    if not _is_size(head_dim) or head_dim % 2:
        return None
    qkv_bias, out_bias, feed_forward_bias = biases[name]
    return TextSettings(
        **{key: config[key] for key in SIZES},
        head_dim=head_dim,
        rms_norm_eps=eps,
        rope_parameters=rope,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        feed_forward_bias=feed_forward_bias,
        head_norms=bool(DECODERS[name].query_norm),
    )


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _has_windows(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether any layer has a sliding window."""
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        return True
    if name == "mistral":
        return config.get("sliding_window", 4096) is not None
    return bool(config.get("use_sliding_window"))


def _rope(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the rotary embedding parameters, in the newer layout or the older; None for unsupported kinds."""
    # Transformers prefers the older entry, which is often added by hand, as for a longer context.
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(found, Mapping) or found.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    kind = found.get("rope_type", found.get("type", "default"))
    theta = found.get("rope_theta", config.get("rope_theta"))
    if not isinstance(theta, int | float) or kind not in {"default", "llama3"}:
        return None
    made = {"rope_type": kind, "rope_theta": theta}
    if kind == "llama3":
        if not all(isinstance(found.get(key), int | float) for key in _LLAMA3):
            return None
        made |= {key: found[key] for key in _LLAMA3}
    return made
