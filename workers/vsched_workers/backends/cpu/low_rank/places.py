"""Positions of adapters in fused layers, whose products were merged or split and have no modules."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vsched_workers.adapters.places import Carrier, LayerPlace, carrier_of, place_of

if TYPE_CHECKING:
    import torch

    from vsched_workers.families.decoder import Decoder
    from vsched_workers.parallel.slicing import Cut


def layer_places(
    layers: Sequence[Any], decoder: Decoder, within: str, cuts: Mapping[str, Cut]
) -> dict[str, list[LayerPlace]]:
    """Return the positions in a language model's fused layers, each with its products, by module name.

    `cuts` are by transformers' names of the layers' weights.
    """
    places: dict[str, list[LayerPlace]] = {}
    for index, layer in enumerate(layers):
        attention, feed_forward = layer.attention, layer.feed_forward
        of_attention = f"{within}layers.{index}.{decoder.attention}."
        of_feed_forward = f"{within}layers.{index}.{decoder.feed_forward}."
        qkv = carrier_of(layer, "qkv", attention.qkv_proj)
        sizes = [size * attention.head_dim for size in (attention.heads, attention.kv_heads)]
        widths = [sizes[0], sizes[1], sizes[1]]
        if len(decoder.qkv) == 1:
            widths = [qkv.outputs]
        first = 0
        for name, outputs in zip(decoder.qkv, widths, strict=True):
            own = of_attention + name
            places[own] = [place_of(qkv, cuts.get(f"{own}.weight"), first=first, outputs=outputs)]
            first += outputs
        for own, attribute, module in (
            (of_attention + decoder.output, "o_proj", attention.o_proj),
            (of_feed_forward + decoder.down, "down", feed_forward.down_proj),
        ):
            carrier = carrier_of(layer, attribute, module)
            places[own] = [place_of(carrier, cuts.get(f"{own}.weight"))]
        gate_up = [
            carrier_of(layer, name, getattr(feed_forward, f"{name}_proj"))
            for name in ("gate", "up")
        ]
        if len(decoder.gate_up) == 1:
            places[of_feed_forward + decoder.gate_up[0]] = _halves(gate_up)
            continue
        for name, carrier in zip(decoder.gate_up, gate_up, strict=True):
            own = of_feed_forward + name
            places[own] = [place_of(carrier, cuts.get(f"{own}.weight"))]
    return places


def _halves(carriers: Sequence[Carrier]) -> list[LayerPlace]:
    """Return the positions of one transformers layer that was split into two products."""
    inputs, outputs = carriers[0].inputs, carriers[0].outputs
    return [
        LayerPlace(carrier, inputs, 2 * outputs, up=functools.partial(_half, half))
        for half, carrier in enumerate(carriers)
    ]


def _half(index: int, up: torch.Tensor) -> torch.Tensor:
    return up.chunk(2)[index]
