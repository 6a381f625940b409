"""Memory for LoRA adapters, allocated when a model is loaded, so that adding one later cannot run out of it.

`bytes_of_one` computes the largest memory of one adapter, with the highest rank on all layers, before any is allocated:
this rank's share, in the format that is kept on its device.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from vsched_workers.adapters.places import Carrier, LayerPlace, Places
from vsched_workers.adapters.sums import MakeSums, Part

LINE = 64
"""Alignment of tensors in bytes."""

Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Allocates zeros of a shape and dtype on the device."""


def zero_parts(places: Places, rank: int) -> dict[Carrier, list[Part]]:
    """Return the parts of an adapter of this rank on all layers with zero weights; it takes no memory."""
    parts: dict[Carrier, list[Part]] = {}
    zero = torch.zeros(1, 1)
    for of_layer in places.values():
        for place in of_layer:
            parts.setdefault(place.carrier, []).append(_zero_part(place, rank, zero))
    return parts


def _zero_part(place: LayerPlace, rank: int, zero: torch.Tensor) -> Part:
    return place.part(zero.expand(rank, place.inputs), zero.expand(place.outputs, rank), 1.0)


def bytes_of_one(places: Places, make_sums: MakeSums, *, rank_max: int) -> int:
    """Return the bytes of an adapter of the highest rank on all layers."""
    counted = _Counted()
    for carrier, parts in zero_parts(places, rank_max).items():
        sums = make_sums(carrier.dtype, carrier.device)
        sums.place([_on_meta(part) for part in parts], counted)
    return counted.bytes


def _on_meta(part: Part) -> Part:
    return part._replace(down=part.down.to("meta"), up=part.up.to("meta"))


class _Counted:
    """An allocator that only counts bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.bytes += _lines(math.prod(shape) * dtype.itemsize)
        return torch.empty(shape, dtype=dtype, device="meta")


class AdapterRoom:
    """Memory for a number of adapters, each of the maximum size."""

    def __init__(self, bytes_each: int, count: int, allocate: Allocate) -> None:
        """Allocate the memory."""
        # One line extra, for alignment of the beginning.
        self._memory = allocate((count * bytes_each + LINE,), torch.uint8)
        self._start = -self._memory.data_ptr() % LINE
        self._bytes_each = bytes_each

    @property
    def bytes(self) -> int:
        """Bytes of the memory for all adapters."""
        return self._memory.nbytes

    def place(self, number: int) -> Callable[[tuple[int, ...], torch.dtype], torch.Tensor]:
        """Return an allocator of one adapter's memory, from its beginning; previous contents are overwritten."""
        start = self._start + number * self._bytes_each
        stop = start + self._bytes_each

        def take(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            nonlocal start
            size = math.prod(shape) * dtype.itemsize
            taken = self._memory[start : start + size].view(dtype).view(shape)
            start += _lines(size)
            assert start <= stop, "an adapter of at most the maximum rank fits"
            return taken

        return take


def own_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate separate host memory."""
    return torch.empty(shape, dtype=dtype)


def _lines(size: int) -> int:
    return -(-size // LINE) * LINE
