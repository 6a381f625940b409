"""LoRA on bfloat16 rows: `made <- made + up (down row)`, each row with the matrices of its own adapter.

All adapters of a product are one call. Rows are ordered by adapter, so that matrices stay in the cache from one row
to the next. Sums are float32 and in one order: a row has the same bits alone and in a batch.

Source: Chen et al., "Punica: Multi-Tenant LoRA Serving" (2023), for rows of many adapters in one call.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
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
from vsched_workers.backends.cpu.kernels.bf16 import bf16_array, float32_array, narrow, widen
from vsched_workers.backends.cpu.kernels.compilation import compiled
from vsched_workers.backends.cpu.kernels.thread_pool import spread
from vsched_workers.backends.cpu.threads import pool_of

if TYPE_CHECKING:
    from vsched_workers.families.decoders import Decoder
    from vsched_workers.parallel.slicing import Cut


RANKS = 4
"""Ranks are padded with zeros to a multiple of this number, which are accumulated at once."""

PART = np.dtype(
    [
        ("down_at", np.int64),
        ("up_at", np.int64),
        ("rank", np.int64),
        ("first", np.int64),
        ("outputs", np.int64),
    ]
)
"""The part of an adapter for the outputs [first, first + outputs) of a product; rank 0 adds nothing.

At `down_at` is float32 [rank, inputs] (A of LoRA), at `up_at` float32 [rank, outputs] (B transposed), times the
scaling.
"""


@compiled()
def _down(row: Any, down_at: int, rank: int, sums: Any) -> None:
    """Multiply a row by each row of a matrix."""
    width = len(row)
    for start in range(0, rank, 4):
        at = down_at + 4 * start * width
        one, two = float32_array(at, width), float32_array(at + 4 * width, width)
        three = float32_array(at + 8 * width, width)
        four = float32_array(at + 12 * width, width)
        first = second = third = fourth = np.float32(0.0)
        for index in range(width):
            first += row[index] * one[index]
            second += row[index] * two[index]
            third += row[index] * three[index]
            fourth += row[index] * four[index]
        sums[start], sums[start + 1] = first, second
        sums[start + 2], sums[start + 3] = third, fourth


@compiled()
def _up(sums: Any, up_at: int, rank: int, total: Any) -> None:
    """Add to a row the rows of a matrix, each times a sum."""
    width = len(total)
    for start in range(0, rank, 4):
        at = up_at + 4 * start * width
        one, two = float32_array(at, width), float32_array(at + 4 * width, width)
        three = float32_array(at + 8 * width, width)
        four = float32_array(at + 12 * width, width)
        first, second = sums[start], sums[start + 1]
        third, fourth = sums[start + 2], sums[start + 3]
        for index in range(width):
            total[index] += (
                first * one[index]
                + second * two[index]
                + third * three[index]
                + fourth * four[index]
            )


@compiled()
def _add_row(row_at: int, inputs: int, made_at: int, parts: Any) -> None:
    source = bf16_array(row_at, inputs)
    row = np.empty(inputs, dtype=np.float32)
    for index in range(inputs):
        row[index] = widen(source[index])
    for number in range(len(parts)):
        rank, outputs = parts[number].rank, parts[number].outputs
        if rank:
            sums = np.empty(rank, dtype=np.float32)
            _down(row, parts[number].down_at, rank, sums)
            target = bf16_array(made_at + 2 * parts[number].first, outputs)
            total = np.empty(outputs, dtype=np.float32)
            for index in range(outputs):
                total[index] = widen(target[index])
            _up(sums, parts[number].up_at, rank, total)
            for index in range(outputs):
                target[index] = narrow(total[index])


@compiled()
def _add_low_rank_rows(
    first: int,
    stop: int,
    rows_at: int,
    inputs: int,
    made_at: int,
    width: int,
    order: Any,
    owners: Any,
    parts: Any,
) -> None:
    for place in range(first, stop):
        row = order[place]
        _add_row(
            rows_at + 2 * row * inputs, inputs, made_at + 2 * row * width, parts[owners[place]]
        )


@compiled()
def add_low_rank(
    pool: int,
    rows_at: int,
    inputs: int,
    made_at: int,
    width: int,
    order: Any,
    owners: Any,
    parts: Any,
) -> None:
    """Add the adapters' products to the rows in `order`.

    Shape: rows bfloat16 [rows, inputs], made bfloat16 [rows, width]; order, owners int64 [n], the row and its
    adapter; parts `PART` [adapters, parts of the product].
    """
    given = rows_at, inputs, made_at, width, order, owners, parts
    spread(pool, len(order), 1, _add_low_rank_rows, given)


def warm_up() -> None:
    """Compile the kernel ahead of the first step with an adapter."""
    none: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
    add_low_rank(0, 0, 0, 0, 0, none, none, np.zeros((1, 1), dtype=PART))


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

    def place(self, parts: Sequence[Part], room: Room) -> Sequence[Part]:
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

    def put(self, owner: int, parts: Sequence[Part]) -> None:
        self._parts[owner] = parts
        self._lay_out()

    def drop(self, owner: int) -> None:
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

    def add(self, rows: torch.Tensor, made: torch.Tensor, call: CallRows) -> None:
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
