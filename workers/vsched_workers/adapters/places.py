"""Where in a module that runs an adapter's parts go: carriers of products, and places within them by layers' names.

An adapter names the layers of transformers' model. What runs here may be made otherwise: products are merged, weights
are packed, a rank has a share. `LayerPlace` tells of one layer of transformers' model which product computes it here,
from which of its outputs on, and what of the two matrices belongs to this rank: the part of the outer product that the
rank has of the weight. Then sums over ranks that are there anyway make it whole.

A carrier takes no time while its product has no adapter: a module that is called gets a forward hook only then, and a
product that is read from an attribute is replaced there only then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from vsched_workers.adapters.rows import AdapterPass
from vsched_workers.adapters.sums import Part, Sums
from vsched_workers.parallel.slicing import Cut, SummedLinear

Share = Callable[[torch.Tensor], torch.Tensor]
"""What of a matrix belongs to a place."""


def whole(matrix: torch.Tensor) -> torch.Tensor:
    """Return all of a matrix."""
    return matrix


class Carrier(ABC):
    """One product, and what adapters add to it.

    Attributes:
        inputs: Of the product; `outputs` likewise.
        checked: Whether each pass with an adapter that has a part here must call it.
        called: Whether this one did.
    """

    checked = False

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.dtype, self.device = dtype, device
        self.called = False
        self._pass = AdapterPass()
        self._owners: set[int] = set()
        self._sums: Sums | None = None

    def join(self, passes: AdapterPass, sums: Sums) -> None:
        """Take what is shared by the products of a module, and what keeps the parts of this one."""
        self._pass, self._sums = passes, sums

    def put(self, owner: int, parts: Sequence[Part]) -> None:
        """Take an adapter's parts, as `Sums.place` returned them."""
        assert self._sums is not None, "join comes first"
        self._sums.put(owner, parts)
        if not self._owners:
            self._attach()
        self._owners.add(owner)

    def drop(self, owner: int) -> None:
        """Forget an adapter's parts, if there are any."""
        if self._sums is not None and owner in self._owners:
            self._sums.drop(owner)
            self._owners.remove(owner)
            if not self._owners:
                self._detach()

    def waits_for(self, owners: set[int]) -> bool:
        """Whether it was not called, though it should have been for one of these adapters."""
        return self.checked and not self.called and not owners.isdisjoint(self._owners)

    def add(self, rows: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """Add to results [..., outputs] of rows [..., inputs], in place where that can be, what their adapters say."""
        call = self._pass.call
        if call is None:
            return made
        self.called = True
        shape = made.shape
        flat = rows.reshape(-1, self.inputs)
        of_call = call.of(len(flat))
        if self._sums is not None and len(of_call.order):
            made = made.reshape(-1, self.outputs)
            self._sums.add(flat, made, of_call)
            made = made.view(shape)
        return made

    @abstractmethod
    def _attach(self) -> None:
        """See to it that `add` is called after the product."""

    @abstractmethod
    def _detach(self) -> None:
        """Leave the product as it was."""


class CalledModule(Carrier):
    """A linear layer, packed or not, that is called as a module."""

    checked = True

    def __init__(self, module: Any) -> None:
        """Take the layer."""
        super().__init__(
            module.in_features, module.out_features, module.weight.dtype, _device_of(module)
        )
        self._module = module
        self._hook: RemovableHandle | None = None

    def _attach(self) -> None:
        # Before hooks that are there already: ranks add up in them.
        self._hook = self._module.register_forward_hook(self._forward, prepend=True)

    def _detach(self) -> None:
        assert self._hook is not None, "it was attached"
        self._hook.remove()
        self._hook = None

    def _forward(self, _: nn.Module, given: tuple[Any, ...], made: torch.Tensor) -> torch.Tensor:
        return self.add(given[0], made)


class HeldProduct(Carrier):
    """A product that its owner keeps in an attribute and calls, without a module between them."""

    def __init__(self, owner: Any, attribute: str, module: Any) -> None:
        """Take the owner, its attribute, and the layer that the product was made of."""
        super().__init__(
            module.in_features, module.out_features, module.weight.dtype, _device_of(module)
        )
        self._owner, self._attribute = owner, attribute
        self._product: Any = None

    def _attach(self) -> None:
        self._product = getattr(self._owner, self._attribute)
        setattr(self._owner, self._attribute, self)

    def _detach(self) -> None:
        setattr(self._owner, self._attribute, self._product)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows, and add what their adapters say."""
        return self.add(rows, self._product(rows))


def _device_of(module: Any) -> torch.device:
    """Return the device of a layer; a packed one, whose plain weight is nowhere, is the host's."""
    device: torch.device = module.weight.device
    return torch.device("cpu") if device.type == "meta" else device


def is_linear(module: Any) -> bool:
    """Return whether a module has inputs and outputs as `nn.Linear` has: it is one, or a packed one."""
    sizes = (getattr(module, name, None) for name in ("in_features", "out_features"))
    return all(isinstance(size, int) for size in sizes) and hasattr(module, "weight")


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where what an adapter adds to one layer of transformers' model goes, or a part of that.

    Attributes:
        inputs: Of the layer in full; `outputs` likewise.
        first: The output of the carrier where it begins.
        down: What of lora_A belongs here; `up` the same of lora_B.
    """

    carrier: Carrier
    inputs: int
    outputs: int
    first: int = 0
    down: Share = whole
    up: Share = whole

    def part(self, down: torch.Tensor, up: torch.Tensor, scaling: float) -> Part:
        """Return the part of an adapter's matrices, [rank, inputs] and [outputs, rank], that belongs here."""
        return Part(self.first, self.down(down), self.up(up), scaling)


Places = Mapping[str, Sequence[LayerPlace]]
"""The places of each layer by its name in transformers' module; most have one."""


def place_of(carrier: Carrier, cut: Cut | None, *, first: int = 0, outputs: int = 0) -> LayerPlace:
    """Return the place of a layer, of whose weight this rank has the part that `cut` tells, None for all of it.

    `outputs` are those that the rank has of the layer; 0 where they are all of the carrier.
    """
    inputs, outputs = carrier.inputs, outputs or carrier.outputs
    if cut is None:
        return LayerPlace(carrier, inputs, outputs, first)
    if cut.dimension:
        return LayerPlace(carrier, cut.whole, outputs, first, down=cut.read)
    return LayerPlace(carrier, inputs, cut.whole, first, up=cut.read)


def carrier_of(owner: Any, attribute: str, module: nn.Module) -> Carrier:
    """Return the carrier of a product that was made of a module and is kept in an attribute.

    Of a layer whose ranks add up, each rank adds to its own part, before.
    """
    if isinstance(module, SummedLinear):
        carrier = CalledModule(module.partial)
        carrier.checked = False  # nor is every product that an owner keeps called in every pass
        return carrier
    return HeldProduct(owner, attribute, module)


def held_places(
    owner: Any, within: str, cuts: Mapping[str, Cut], held: Mapping[str, tuple[str, nn.Module]]
) -> dict[str, list[LayerPlace]]:
    """Return the places of products that an owner keeps: of each layer its attribute, and the module that it is of."""
    return {
        within + name: [
            place_of(carrier_of(owner, attribute, module), cuts.get(f"{within}{name}.weight"))
        ]
        for name, (attribute, module) in held.items()
    }


class Fused(Protocol):
    """What computes a part of a module by itself, with products that it keeps."""

    def adapter_places(
        self, within: str, cuts: Mapping[str, Cut], /
    ) -> Mapping[str, list[LayerPlace]]:
        """Return its places; `within` is what its layers' names begin with in transformers' module."""
        ...


def module_places(module: nn.Module, cuts: Mapping[str, Cut]) -> dict[str, list[LayerPlace]]:
    """Return the places of the linear layers of a module that calls them; `cuts` are by the names of weights.

    Parts of it that compute by themselves tell their own.
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
            places[own] = [place_of(CalledModule(child), cuts.get(f"{own}.weight"))]
    return places


def _is_summed(module: nn.Module, name: str) -> bool:
    return isinstance(module.get_submodule(name.rpartition(".")[0]), SummedLinear)
