"""What layers keep of a sequence besides keys and values, read from a configuration without torch.

Architectures name these sizes differently, so what is here follows from the names that a configuration has. A rank
compares it with what the layers really keep, before it serves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

ATTENDING = frozenset({"full_attention", "sliding_attention", "hybrid"})
"""Kinds of layers that keep keys and values: each token is seen by all later ones, or by those of a window."""

STATEFUL = frozenset({"linear_attention", "conv", "hybrid"})
"""Kinds of layers that keep a state of one size, however long the sequence is."""

NEITHER = frozenset({"mlp", "moe"})
"""Kinds of layers that keep nothing."""


class LayerState(NamedTuple):
    """Values that one layer keeps of a sequence: of the model's type, and of float32 whatever that is."""

    values: int
    float32_values: int = 0


def layer_kinds(config: Any) -> tuple[str, ...]:
    """Return the kind of each layer; empty where the configuration names none."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return tuple(kinds)


def state_bytes(config: Any, itemsize: int) -> int | None:
    """Return the bytes that all layers keep of a sequence beside keys and values; 0 where no layer does.

    None where the configuration tells the sizes by no names that are known here.
    """
    count = sum(kind in STATEFUL for kind in layer_kinds(config))
    if not count:
        return 0
    state = _layer_state(config)
    if state is None:
        return None
    return count * (state.values * itemsize + state.float32_values * 4)


def _layer_state(config: Any) -> LayerState | None:
    if hasattr(config, "conv_L_cache"):  # a short convolution alone
        return LayerState(config.hidden_size * config.conv_L_cache)
    if hasattr(config, "linear_num_value_heads"):  # gated delta rule
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        recurrent = values * config.linear_key_head_dim
        return LayerState((2 * keys + values) * config.linear_conv_kernel_dim, recurrent)
    if hasattr(config, "mamba_d_head"):  # Mamba 2, by three sets of names
        inner = config.mamba_n_heads * config.mamba_d_head
        groups, size, kernel = config.mamba_n_groups, config.mamba_d_state, config.mamba_d_conv
        return LayerState((inner + 2 * groups * size) * kernel, inner * size)
    if hasattr(config, "mamba_head_dim"):
        inner = config.mamba_num_heads * config.mamba_head_dim
        size = config.ssm_state_size
        return LayerState((inner + 2 * config.n_groups * size) * config.conv_kernel, inner * size)
    if hasattr(config, "mamba_d_state"):  # Mamba 1
        inner = config.mamba_expand * config.hidden_size
        return LayerState(inner * config.mamba_d_conv, inner * config.mamba_d_state)
    if hasattr(config, "linear_head_dim"):  # Kimi delta attention
        inner = config.linear_num_heads * config.linear_head_dim
        return LayerState(3 * inner * config.linear_conv_kernel_dim, inner * config.linear_head_dim)
    if hasattr(config, "linear_attn_alpha_factor"):  # lightning attention
        heads = config.num_attention_heads
        head_dim = config.head_dim or config.hidden_size // heads
        return LayerState(heads * head_dim * head_dim)
    return None
