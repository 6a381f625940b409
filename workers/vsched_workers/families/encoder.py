"""Descriptions of vision tower layers: names of modules, for backends with their own layer implementation.

Most towers have the structure of the first vision transformers: layer norms, full attention with as many key heads as
query heads, an MLP with GELU. They differ in names, and some scale the outputs in residual sums. A tower is recognized
by its modules, not by its family's name: a layer with the modules of a description is tested, since its computation is
in its code (`backends/cpu/encoder_layers.py`).

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (ICLR 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """The names of modules within a layer.

    Attributes:
        norms: The norms before attention and before the MLP.
        attention: The attention module, with query, key and value projections, and `num_heads`.
        output: Its output projection.
        inner: The MLP module, with two linear layers and an activation in between.
        scales: Parameters that scale the outputs of attention and MLP in residual sums; empty if there are none.
    """

    norms: Sequence[str] = ("layer_norm1", "layer_norm2")
    attention: str = "self_attn"
    qkv: Sequence[str] = ("q_proj", "k_proj", "v_proj")
    output: str = "out_proj"
    inner: str = "mlp"
    linears: Sequence[str] = ("fc1", "fc2")
    activation: str = "activation_fn"
    scales: Sequence[str] = ()


ENCODERS: Sequence[Encoder] = (
    Encoder(),
    Encoder(
        norms=("layernorm_before", "layernorm_after"),
        attention="attention",
        output="projection_layer",
        scales=("lambda_1", "lambda_2"),
    ),
)
"""Known structures: CLIP and SigLIP, and InternVL."""
