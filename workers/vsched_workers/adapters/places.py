"""Targets of a LoRA adapter in a running module, its contributions to their results, and the memory for adapters.

An adapter names the layers of transformers' model. The running module may differ: products are merged, weights are
packed, a rank has a share. A `LayerPlace` maps one layer of transformers' model to the product that computes it here
(its carrier), with an offset in its outputs, and this rank's share of the two matrices, which matches its share of the
weight. Existing sums over ranks then complete it. A carrier costs nothing while its product has no adapter: only then
does a called module get a forward hook, and a product in an attribute get replaced.

`TorchSums` is for any device: for each adapter its rows are gathered by an index, multiplied by its two small matrices,
and added back. A row has at most one adapter, so no two additions meet and the sum has one order. On a CPU in bfloat16
a compiled kernel does the same for all adapters in one call (`backends/cpu/kernels/low_rank.py`). On a CPU the matrices
are float32 for weights of any type, as in PEFT: they are small, and the sum is rounded once. On other devices they have
the type of the weights.

Memory is allocated when a model is loaded, so that adding an adapter later cannot run out of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from vsched_workers.parallel.slicing import Cut, SummedLinear

Owners = npt.NDArray[np.int64]
"""The number of each row's adapter; `BASE_MODEL` for the base model."""

BASE_MODEL = -1


class CallRows:
    """The rows of a product's call that have an adapter.

    Attributes:
        order: The rows, grouped by adapter; `owners` are their adapters. int64.
    """

    def __init__(self, owners: Owners, count: int) -> None:
        """Take the owners of the first rows of `count`; the others are padding."""
        self._count = count
        order = np.argsort(owners, kind="stable")
        self.order = order[int((owners < 0).sum()) :]
        self.owners = owners[self.order]

    def of(self, count: int) -> CallRows:
        """Return the rows of a call with `count` rows."""
        assert count == self._count, f"a layer got {count} rows in a pass of {self._count}"
        return self

    @functools.cached_property
    def groups(self) -> Sequence[tuple[int, torch.Tensor]]:
        """Each adapter and its rows."""
        found = np.unique(self.owners).tolist()
        return [(each, torch.from_numpy(self.order[self.owners == each])) for each in found]

    def groups_on(self, device: torch.device) -> Sequence[tuple[int, torch.Tensor]]:
        """Return each adapter and its rows on a device, copied once."""
        if device.type == "cpu":
            return self.groups
        if self._sent is None:
            self._sent = [(owner, rows.to(device)) for owner, rows in self.groups]
        return self._sent

    _sent: Sequence[tuple[int, torch.Tensor]] | None = None


class PassRows:
    """The rows of a pass over a step; the code that runs the pass selects the rows of each call."""

    def __init__(self, owners: Owners) -> None:
        """Take the owners of all rows."""
        self._owners = owners
        self._parts: dict[tuple[int, int], CallRows] = {}

    @property
    def all(self) -> CallRows:
        """The rows of calls over all rows."""
        return self.part(0, len(self._owners))

    def part(self, start: int, stop: int) -> CallRows:
        """Return the rows [start, stop); rows after the last one are padding."""
        key = start, stop
        if key not in self._parts:
            self._parts[key] = CallRows(self._owners[start:stop], stop - start)
        return self._parts[key]

    def only(self, wanted: npt.NDArray[np.int64]) -> PassRows:
        """Return some of the rows, in this order."""
        return PassRows(self._owners[wanted])


class RowsOfOne:
    """Rows of one adapter, for calls with any number of rows, as for images."""

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._calls: dict[int, CallRows] = {}

    def of(self, count: int) -> CallRows:
        """Return the rows of a call with `count` rows."""
        if count not in self._calls:
            self._calls[count] = CallRows(np.full(count, self._owner), count)
        return self._calls[count]


class AdapterPass:
    """The current pass over a module, if any row has an adapter; shared by all its products.

    Attributes:
        rows: All rows, if calls of a product may use a part of them; None outside of such a pass.
        call: The rows of the next call; None if no row has an adapter.
    """

    rows: PassRows | None = None
    call: CallRows | RowsOfOne | None = None


class Part(NamedTuple):
    """A LoRA contribution to a product's outputs from `first` on: `scaling * up @ down`.

    Shape: down [rank, inputs], up [outputs, rank].
    """

    first: int
    down: torch.Tensor
    up: torch.Tensor
    scaling: float


Room = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Allocates a tensor of a shape and type on the device; zeros, if for all adapters."""

MakeSums = Callable[[torch.dtype, torch.device], "TorchSums"]
"""Factory of the adapter parts of a product with this type on this device."""


class TorchSums:
    """The adapter parts of one product, with torch's own products, on any device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """Take the type and the device of the product's weight."""
        self._dtype = torch.float32 if device.type == "cpu" else dtype
        self._parts: dict[int, Sequence[Part]] = {}

    def place_parts(self, parts: Sequence[Part], room: Room) -> Sequence[Part]:
        """Copy an adapter's parts into memory from `room` and return them; no other memory is kept."""
        kept = []
        for first, down, up, scaling in parts:
            own_down, own_up = (
                room(tuple(each.shape), self._dtype).copy_(each) for each in (down, up)
            )
            kept.append(Part(first, own_down, own_up, scaling))
        return kept

    def put_parts(self, owner: int, parts: Sequence[Part]) -> None:
        """Install the parts that `place` returned for an adapter."""
        self._parts[owner] = parts

    def drop_parts(self, owner: int) -> None:
        """Remove an adapter's parts, if there are any."""
        self._parts.pop(owner, None)

    def add_products(self, rows: torch.Tensor, made: torch.Tensor, call: CallRows) -> None:
        """Add the adapters' contributions to results [n, outputs] of rows [n, inputs]."""
        for owner, index in call.groups_on(made.device):
            parts = self._parts.get(owner, ())
            own = rows[index].to(self._dtype) if parts else rows
            for first, down, up, scaling in parts:
                target = made[:, first : first + len(up)]
                added = (own @ down.T) @ up.T
                target[index] = (target[index] + added * scaling).to(made.dtype)


Share = Callable[[torch.Tensor], torch.Tensor]
"""Select this place's share of a matrix."""


def whole(matrix: torch.Tensor) -> torch.Tensor:
    """Return all of a matrix."""
    return matrix


class Carrier:
    """One product, and the adapters' contributions to it.

    The product is a linear layer, packed or not, that is called as a module; or its owner keeps it in an attribute and
    calls it directly. While it has no adapter it costs nothing.

    Attributes:
        inputs: Of the product; `outputs` likewise.
    """

    def __init__(self, module: Any, owner: Any = None, attribute: str = "") -> None:
        """Take the layer, and if the product built from it is called directly, its owner and attribute."""
        self.inputs, self.outputs = module.in_features, module.out_features
        self.dtype, self.device = module.weight.dtype, _device_of(module)
        self._module, self._owner, self._attribute = module, owner, attribute
        self._product: Any = None
        self._hook: RemovableHandle | None = None
        self._pass = AdapterPass()
        self._owners: set[int] = set()
        self._sums: TorchSums | None = None

    def join(self, passes: AdapterPass, sums: TorchSums) -> None:
        """Set the pass that a module's products share, and the adapter parts of this product."""
        self._pass, self._sums = passes, sums

    def put_parts(self, number: int, parts: Sequence[Part]) -> None:
        """Install an adapter's parts, as returned by `TorchSums.place`."""
        assert self._sums is not None, "join comes first"
        self._sums.put_parts(number, parts)
        if not self._owners:
            self._attach()
        self._owners.add(number)

    def drop_parts(self, number: int) -> None:
        """Remove an adapter's parts, if there are any."""
        if self._sums is not None and number in self._owners:
            self._sums.drop_parts(number)
            self._owners.remove(number)
            if not self._owners:
                self._detach()

    def add_products(self, rows: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """Add the adapters' contributions to results [..., outputs] of rows [..., inputs], in place if possible."""
        call = self._pass.call
        if call is None:
            return made
        shape = made.shape
        flat = rows.reshape(-1, self.inputs)
        of_call = call.of(len(flat))
        if self._sums is not None and len(of_call.order):
            made = made.reshape(-1, self.outputs)
            self._sums.add_products(flat, made, of_call)
            made = made.view(shape)
        return made

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows in place of the owner's product, and add their adapters' contributions."""
        return self.add_products(rows, self._product(rows))

    def _attach(self) -> None:
        if self._owner is None:
            # Before existing hooks, which sum over ranks.
            self._hook = self._module.register_forward_hook(
                lambda _, given, made: self.add_products(given[0], made), prepend=True
            )
        else:
            self._product = getattr(self._owner, self._attribute)
            setattr(self._owner, self._attribute, self)

    def _detach(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        else:
            setattr(self._owner, self._attribute, self._product)


def _device_of(module: Any) -> torch.device:
    """Return the device of a layer; for a packed layer, without a plain weight, the host."""
    device: torch.device = module.weight.device
    return torch.device("cpu") if device.type == "meta" else device


def is_linear(module: Any) -> bool:
    """Return whether a module has the interface of `nn.Linear`: it is one, or a packed one."""
    sizes = (getattr(module, name, None) for name in ("in_features", "out_features"))
    return all(isinstance(size, int) for size in sizes) and hasattr(module, "weight")


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The target of one layer of transformers' model, or of a part of it, in a carrier.

    Attributes:
        inputs: Of the full layer; `outputs` likewise.
        first: The carrier's output at which it begins.
        down: Select this place's share of lora_A; `up` likewise of lora_B.
    """

    carrier: Carrier
    inputs: int
    outputs: int
    first: int = 0
    down: Share = whole
    up: Share = whole

    def part(self, down: torch.Tensor, up: torch.Tensor, scaling: float) -> Part:
        """Return this place's part of an adapter's matrices, [rank, inputs] and [outputs, rank]."""
        return Part(self.first, self.down(down), self.up(up), scaling)


Places = Mapping[str, Sequence[LayerPlace]]
"""The places of each layer by its name in transformers' module; most layers have one."""


def place_of(carrier: Carrier, cut: Cut | None, *, first: int = 0, outputs: int = 0) -> LayerPlace:
    """Return the place of a layer; `cut` is this rank's share of its weight, None for all of it.

    `outputs` is the number of the layer's outputs on this rank; 0 if they are all of the carrier's.
    """
    inputs, outputs = carrier.inputs, outputs or carrier.outputs
    if cut is None:
        return LayerPlace(carrier, inputs, outputs, first)
    if cut.dimension:
        return LayerPlace(carrier, cut.whole, outputs, first, down=cut.read)
    return LayerPlace(carrier, inputs, cut.whole, first, up=cut.read)


def carrier_of(owner: Any, attribute: str, module: nn.Module) -> Carrier:
    """Return the carrier of a product that was built from a module and is kept in an attribute.

    For a layer whose results are summed over ranks, each rank adds to its own part, before the sum.
    """
    if isinstance(module, SummedLinear):
        return Carrier(module.partial)
    return Carrier(module, owner, attribute)


def held_places(
    owner: Any, within: str, cuts: Mapping[str, Cut], held: Mapping[str, tuple[str, nn.Module]]
) -> dict[str, list[LayerPlace]]:
    """Return the places of products that an owner keeps: `held` has the attribute and the module of each layer."""
    return {
        within + name: [
            place_of(carrier_of(owner, attribute, module), cuts.get(f"{within}{name}.weight"))
        ]
        for name, (attribute, module) in held.items()
    }


def module_places(module: nn.Module, cuts: Mapping[str, Cut]) -> dict[str, list[LayerPlace]]:
    """Return the places of a module's linear layers that are called; `cuts` are by the names of weights.

    Parts that compute with products of their own return their own places (`adapter_places`).
    """
    places: dict[str, list[LayerPlace]] = {}
    fused: list[str] = []
    for name, child in module.named_modules():
        if any(name.startswith(within) for within in fused):
            continue
        part = child if hasattr(child, "adapter_places") else child.forward
        if hasattr(part, "adapter_places"):
            fused.append(f"{name}.")
            places.update(part.adapter_places(f"{name}.", cuts))
        elif is_linear(child):
            own = name.removesuffix(".partial") if _is_summed(module, name) else name
            places[own] = [place_of(Carrier(child), cuts.get(f"{own}.weight"))]
    return places


def _is_summed(module: nn.Module, name: str) -> bool:
    return isinstance(module.get_submodule(name.rpartition(".")[0]), SummedLinear)


LINE = 64
"""Alignment of tensors in bytes."""


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
        sums.place_parts([_on_meta(part) for part in parts], counted)
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

    def __init__(self, bytes_each: int, count: int, allocate: Room) -> None:
        """Allocate the memory."""
        # One line extra, for alignment of the beginning.
        self._memory = allocate((count * bytes_each + LINE,), torch.uint8)
        self._start = -self._memory.data_ptr() % LINE
        self._bytes_each = bytes_each

    @property
    def bytes(self) -> int:
        """Bytes of the memory for all adapters."""
        return self._memory.nbytes

    def room_of(self, number: int) -> Room:
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
