"""Targets of a LoRA adapter in a running module: carriers, which are products, and places of layers within them.

An adapter names the layers of transformers' model. The running module may differ: products are merged, weights are
packed, a rank has a share. A `LayerPlace` maps one layer of transformers' model to the product that computes it here,
with an offset in its outputs, and this rank's share of the two matrices, which matches its share of the weight.
Existing sums over ranks then complete it.

A carrier costs nothing while its product has no adapter: only then does a called module get a forward hook, and a
product in an attribute get replaced.
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
"""Select this place's share of a matrix."""


def whole(matrix: torch.Tensor) -> torch.Tensor:
    """Return all of a matrix."""
    return matrix


class Carrier(ABC):
    """One product, and the adapters' contributions to it.

    Attributes:
        inputs: Of the product; `outputs` likewise.
        checked: Whether each pass with an adapter that has a part here must call it.
        called: Whether the current pass did.
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
        """Set the pass that a module's products share, and the adapter parts of this product."""
        self._pass, self._sums = passes, sums

    def put(self, owner: int, parts: Sequence[Part]) -> None:
        """Install an adapter's parts, as returned by `Sums.place`."""
        assert self._sums is not None, "join comes first"
        self._sums.put(owner, parts)
        if not self._owners:
            self._attach()
        self._owners.add(owner)

    def drop(self, owner: int) -> None:
        """Remove an adapter's parts, if there are any."""
        if self._sums is not None and owner in self._owners:
            self._sums.drop(owner)
            self._owners.remove(owner)
            if not self._owners:
                self._detach()

    def waits_for(self, owners: set[int]) -> bool:
        """Return whether it was not called, although one of these adapters has a part here."""
        return self.checked and not self.called and not owners.isdisjoint(self._owners)

    def add(self, rows: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """Add the adapters' contributions to results [..., outputs] of rows [..., inputs], in place if possible."""
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
        """Have `add` called after the product."""

    @abstractmethod
    def _detach(self) -> None:
        """Restore the product."""


class CalledModule(Carrier):
    """A linear layer, packed or not, that is called as a module."""

    checked = True

    def __init__(self, module: Any) -> None:
        super().__init__(
            module.in_features, module.out_features, module.weight.dtype, _device_of(module)
        )
        self._module = module
        self._hook: RemovableHandle | None = None

    def _attach(self) -> None:
        # Before existing hooks, which sum over ranks.
        self._hook = self._module.register_forward_hook(self._forward, prepend=True)

    def _detach(self) -> None:
        assert self._hook is not None, "it was attached"
        self._hook.remove()
        self._hook = None

    def _forward(self, _: nn.Module, given: tuple[Any, ...], made: torch.Tensor) -> torch.Tensor:
        return self.add(given[0], made)


class HeldProduct(Carrier):
    """A product that its owner keeps in an attribute and calls directly, not as a module."""

    def __init__(self, owner: Any, attribute: str, module: Any) -> None:
        """Take the owner, its attribute, and the layer that the product was built from."""
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
        """Multiply rows, and add their adapters' contributions."""
        return self.add(rows, self._product(rows))


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
        carrier = CalledModule(module.partial)
        carrier.checked = False  # not every product that an owner keeps is called in every pass
        return carrier
    return HeldProduct(owner, attribute, module)


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


class Fused(Protocol):
    """A part of a module that computes with products of its own."""

    def adapter_places(
        self, within: str, cuts: Mapping[str, Cut], /
    ) -> Mapping[str, list[LayerPlace]]:
        """Return its places; `within` is the prefix of its layers' names in transformers' module."""
        ...


def module_places(module: nn.Module, cuts: Mapping[str, Cut]) -> dict[str, list[LayerPlace]]:
    """Return the places of a module's linear layers that are called; `cuts` are by the names of weights.

    Parts that compute with products of their own return their own places.
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
