"""The contributions of LoRA adapters to the results of one product.

`TorchSums` is for any device: for each adapter its rows are gathered by an index, multiplied by its two small matrices,
and added back. A row has at most one adapter, so no two additions meet and the sum has one order. On a CPU in bfloat16
a compiled kernel does the same for all adapters in one call (`backends/cpu/low_rank/`).

On a CPU the matrices are float32 for weights of any type, as in PEFT: they are small, and the sum is rounded once. On
other devices they have the type of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from vsched_workers.adapters.rows import CallRows


class Part(NamedTuple):
    """A LoRA contribution to a product's outputs from `first` on: `scaling * up @ down`.

    Shape: down [rank, inputs], up [outputs, rank].
    """

    first: int
    down: torch.Tensor
    up: torch.Tensor
    scaling: float


class Sums(Protocol):
    """The adapter parts of one product."""

    def place(self, parts: Sequence[Part], room: Room) -> Sequence[Part]:
        """Copy an adapter's parts into memory from `room` and return them; no other memory is kept."""
        ...

    def put(self, owner: int, parts: Sequence[Part]) -> None:
        """Install the parts that `place` returned for an adapter."""
        ...

    def drop(self, owner: int) -> None:
        """Remove an adapter's parts, if there are any."""
        ...

    def add(self, rows: torch.Tensor, made: torch.Tensor, call: CallRows) -> None:
        """Add the adapters' contributions to results [n, outputs] of rows [n, inputs]."""
        ...


Room = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Allocates a tensor of this shape and type on the device."""

MakeSums = Callable[[torch.dtype, torch.device], Sums]
"""Factory of the adapter parts of a product with this type on this device."""


class TorchSums:
    """Adapter parts with torch's own products, on any device; see `Sums`."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """Take the type and the device of the product's weight."""
        self._dtype = kept_type(dtype, device)
        self._parts: dict[int, Sequence[Part]] = {}

    def place(self, parts: Sequence[Part], room: Room) -> Sequence[Part]:
        kept = []
        for first, down, up, scaling in parts:
            own_down, own_up = (
                room(tuple(each.shape), self._dtype).copy_(each) for each in (down, up)
            )
            kept.append(Part(first, own_down, own_up, scaling))
        return kept

    def put(self, owner: int, parts: Sequence[Part]) -> None:
        self._parts[owner] = parts

    def drop(self, owner: int) -> None:
        self._parts.pop(owner, None)

    def add(self, rows: torch.Tensor, made: torch.Tensor, call: CallRows) -> None:
        for owner, index in call.groups_on(made.device):
            parts = self._parts.get(owner, ())
            own = rows[index].to(self._dtype) if parts else rows
            for first, down, up, scaling in parts:
                target = made[:, first : first + len(up)]
                added = (own @ down.T) @ up.T
                target[index] = (target[index] + added * scaling).to(made.dtype)


def kept_type(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the type of LoRA matrices for a weight."""
    return torch.float32 if device.type == "cpu" else dtype
