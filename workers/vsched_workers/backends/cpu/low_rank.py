"""The products of LoRA adapters in fused CPU layers: positions of the adapters, and calls of the kernel."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vsched_workers.adapters.places import (
    CallRows,
    Carrier,
    LayerPlace,
    Part,
    Room,
    TorchSums,
    carrier_of,
    place_of,
)
from vsched_workers.backends.cpu.kernels.low_rank import PART, RANKS, add_low_rank
from vsched_workers.backends.cpu.threads import pool_of

if TYPE_CHECKING:
    from vsched_workers.families.decoders import Decoder
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


PARALLEL_VALUES_MIN = 1 << 18
"""Products of fewer values run on one thread: waking the others takes longer."""


class KernelSums(TorchSums):
    """The adapter parts of one product, by the compiled kernel."""

    def __init__(self, threads: int) -> None:
        self._pool = pool_of(threads)
        self._parts: dict[int, Sequence[Part]] = {}
        self._table = np.zeros((0, 0), dtype=PART)
        self._values = 0

    def place_parts(self, parts: Sequence[Part], room: Room) -> Sequence[Part]:
        placed = []
        for first, down, up, scaling in parts:
            rank = len(down)
            padded = -(-rank // RANKS) * RANKS
            kept, across = (
                room((padded, width), torch.float32) for width in (down.shape[1], len(up))
            )
            kept[rank:], across[rank:] = 0, 0
            kept[:rank] = down
            across[:rank] = up.T.float() * scaling
            placed.append(Part(first, kept, across, 1.0))
        return placed

    def put_parts(self, owner: int, parts: Sequence[Part]) -> None:
        self._parts[owner] = parts
        self._lay_out()

    def drop_parts(self, owner: int) -> None:
        if self._parts.pop(owner, None) is not None:
            self._lay_out()

    def _lay_out(self) -> None:
        """Rebuild the table of the parts of each adapter; missing parts have rank 0."""
        widest = max(map(len, self._parts.values()), default=0)
        self._table = np.zeros((max(self._parts, default=-1) + 1, widest), dtype=PART)
        for owner, parts in self._parts.items():
            for number, (first, down, up, _) in enumerate(parts):
                rank, outputs = up.shape
                self._table[owner, number] = down.data_ptr(), up.data_ptr(), rank, first, outputs
        sizes = [
            down.numel() + up.numel() for parts in self._parts.values() for _, down, up, _ in parts
        ]
        self._values = max(sizes, default=0)

    def add_products(self, rows: torch.Tensor, made: torch.Tensor, call: CallRows) -> None:
        assert made.is_contiguous(), "`made` must be contiguous"
        order, owners = call.order, call.owners
        if owners[-1] >= len(self._table):  # adapters loaded later have no part here
            known = owners < len(self._table)
            order, owners = order[known], owners[known]
        rows = rows.contiguous()
        many = len(order) * self._values >= PARALLEL_VALUES_MIN
        add_low_rank(
            self._pool if many else 0,
            rows.data_ptr(),
            rows.shape[1],
            made.data_ptr(),
            made.shape[1],
            order,
            owners,
            self._table,
        )
