"""Memory for adapters, taken when a model is loaded, so that adding one later never runs out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from vsched_workers.adapters.files import Adapter, LowRankPair


class LayerSize(NamedTuple):
    """Inputs and outputs of a linear layer."""

    inputs: int
    outputs: int


def layer_sizes(module: nn.Module, *, without: nn.Module | None = None) -> dict[str, LayerSize]:
    """Return the linear layers of a module by name, but one: whatever has inputs and outputs as `nn.Linear` has."""
    found: dict[str, LayerSize] = {}
    for name, layer in module.named_modules():
        sizes: Any = (getattr(layer, "in_features", None), getattr(layer, "out_features", None))
        if all(isinstance(size, int) for size in sizes) and layer is not without:
            found[name] = LayerSize(*sizes)
    return found


class AdapterRoom:
    """Places for a number of adapters, each large enough for one of the highest rank on all layers."""

    def __init__(
        self,
        sizes: Mapping[str, LayerSize],
        *,
        count: int,
        rank_max: int,
        dtype: torch.dtype,
        allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
    ) -> None:
        """Take the memory; `allocate` returns zeros of a shape and dtype on the device."""
        self._sizes = sizes
        self._rank_max = rank_max
        values = rank_max * sum(size.inputs + size.outputs for size in sizes.values())
        self._memory = allocate((count, max(values, 1)), dtype)
        self._free = list(range(count))
        self._taken: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        """Bytes of all places."""
        return self._memory.nbytes

    def put(self, number: int, adapter: Adapter) -> Adapter:
        """Return a copy of an adapter in a free place; its layers are among those that there is room for."""
        place = self._memory[self._take(number)]
        copied: dict[str, LowRankPair] = {}
        start = 0
        for module, pair in adapter.pairs.items():
            middle = start + pair.down.numel()
            stop = middle + pair.up.numel()
            down = place[start:middle].view(pair.down.shape).copy_(pair.down)
            up = place[middle:stop].view(pair.up.shape).copy_(pair.up)
            copied[module] = LowRankPair(down, up, pair.scaling)
            start = stop
        return Adapter(copied)

    def put_trial(self, number: int, name_of: Callable[[str], str]) -> Adapter:
        """Return an adapter of the highest rank on all layers, in a free place; `name_of` gives its names of layers."""
        place, start = self._memory[self._take(number)], 0
        pairs: dict[str, LowRankPair] = {}
        for name, size in self._sizes.items():
            middle = start + self._rank_max * size.inputs
            stop = middle + self._rank_max * size.outputs
            down = place[start:middle].view(self._rank_max, size.inputs)
            up = place[middle:stop].view(size.outputs, self._rank_max)
            pairs[name_of(name)] = LowRankPair(down, up, 1.0)
            start = stop
        return Adapter(pairs)

    def free(self, number: int) -> None:
        """Give a place back, if there is one."""
        place = self._taken.pop(number, None)
        if place is not None:
            self._free.append(place)

    def _take(self, number: int) -> int:
        assert self._free, "the engine counts adapters"
        self._taken[number] = self._free.pop()
        return self._taken[number]
