"""Sizes of recurrent states, read from a configuration without torch.

Architectures name these sizes differently, so the computation depends on the names in a configuration. A rank compares
the results with the actual sizes before it serves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

ATTENDING = frozenset({"full_attention", "sliding_attention", "hybrid"})
"""Layer types that keep keys and values: all later tokens attend to each token, or only within a window."""

STATEFUL = frozenset({"linear_attention", "conv", "hybrid"})
"""Layer types with a state of constant size, independent of the sequence's length."""

NEITHER = frozenset({"mlp", "moe"})
"""Layer types without keys, values or states."""


class LayerState(NamedTuple):
    """Number of state values per sequence in one layer: in the model's data type, and always in float32."""

    values: int
    float32_values: int = 0


def layer_kinds(config: Any) -> tuple[str, ...]:
    """Return the type of each layer; empty if the configuration does not list them."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return tuple(kinds)


def state_bytes(config: Any, itemsize: int) -> int | None:
    """Return the bytes of all layers' recurrent states per sequence; 0 without recurrent layers.

    None if the configuration has no known names for the sizes.
    """
    count = sum(kind in STATEFUL for kind in layer_kinds(config))
    if not count:
        return 0
    state = _layer_state(config)
    if state is None:
        return None
    return count * (state.values * itemsize + state.float32_values * 4)


def _layer_state(config: Any) -> LayerState | None:
    if hasattr(config, "conv_L_cache"):  # only a short convolution
        return LayerState(config.hidden_size * config.conv_L_cache)
    if hasattr(config, "linear_num_value_heads"):  # gated delta rule
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        recurrent = values * config.linear_key_head_dim
        return LayerState((2 * keys + values) * config.linear_conv_kernel_dim, recurrent)
    if hasattr(config, "mamba_d_head"):  # Mamba 2, with three sets of names
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
