"""Of what the layers of vision towers are made: names of modules, for backends that compute layers by themselves.

Most towers are of one make, that of the first vision transformers: layer norms, full attention with as many key heads
as query heads, an inner layer with a GELU. They differ in names, and some scale what a layer adds. A tower is known by
its modules, not by the name of its family: a layer that has the modules of a make is tried, for what it computes is in
its code (`backends/cpu/encoder_layers.py`).

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (ICLR 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """The names of modules within a layer.

    Attributes:
        norms: The norms before attention and before the inner layer.
        attention: The module of attention, with linear layers of queries, keys and values, and `num_heads`.
        output: Its linear layer after attention.
        inner: The module of the inner layer, with two linear layers and an activation between.
        scales: Parameters that what is added after attention and after the inner layer is multiplied with; empty where
            there are none.
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
"""The makes that are known: those of CLIP and SigLIP, and of InternVL."""
