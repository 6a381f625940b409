"""Mixtures of experts over packed weights: one pair of products for each expert, in place of transformers' module.

torch multiplies grouped bfloat16 matrices on a CPU without AVX512-BF16 at a tenth of the rate of these products, and
transformers keeps the weights of experts in one tensor, which the packing of linear layers does not see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from vsched_workers.backends.reference.packed_weights import MakeProduct, PackedProduct


class PackedExperts:
    """The forward pass of an experts module: transformers' `grouped_mm` over packed products.

    The result of a row does not depend on the other rows.

    Attributes:
        products: All products.
        size_bytes: Bytes of their weights.
    """

    def __init__(self, experts: Any, make: MakeProduct) -> None:
        """Pack a copy of the weights of a module of transformers, [experts, out, in] or transposed, and remove them."""
        self._experts = experts
        self._inner = list(_products(experts, _inner_name(experts), make))
        self._outer = list(_products(experts, "down_proj", make))
        self.products: Sequence[PackedProduct] = [*self._inner, *self._outer]
        self.size_bytes = sum(product.size_bytes for product in self.products)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Run rows [rows, hidden] through their chosen experts, [rows, choices]; return the weighted sums."""
        experts, (rows, choices) = self._experts, top_k_index.shape
        if not rows:  # experts for images in a step of text alone
            return torch.empty_like(hidden_states)
        chosen = top_k_index.reshape(-1)
        order = torch.argsort(chosen, stable=True)
        counts = torch.bincount(chosen, minlength=len(self._inner)).tolist()
        values = _multiply(self._inner, hidden_states[order // choices], counts)
        values = experts._apply_gate(values) if experts.has_gate else experts.act_fn(values)  # noqa: SLF001
        values = _multiply(self._outer, values, counts)
        if experts.has_post_expert_norm:
            values = experts.post_expert_norm(values)
        found = torch.empty_like(values)
        found[order] = values
        weighted = found.view(rows, choices, -1) * top_k_weights[..., None]
        return weighted.sum(1).to(hidden_states.dtype)


def pack_experts(module: nn.Module, make: MakeProduct) -> list[PackedExperts]:
    """Replace the forward passes of the mixtures of experts below a module, and return the new ones."""
    packed = []
    for experts in _mixtures(module):
        experts.forward = PackedExperts(experts, make)
        packed.append(experts.forward)
    return packed


def expert_names(module: nn.Module) -> list[str]:
    """Return the names of the experts' weights below a module that get packed."""
    names = {id(experts): name for name, experts in module.named_modules()}
    return [
        f"{names[id(experts)]}.{weight}"
        for experts in _mixtures(module)
        for weight in (_inner_name(experts), "down_proj")
    ]


def _mixtures(module: nn.Module) -> Iterator[Any]:
    """Yield the modules that transformers runs by its experts interface, with whole experts."""
    for child in module.modules():
        if getattr(child, "_is_expert_parallel", None) is False and "forward" not in vars(child):
            yield child


def _inner_name(experts: Any) -> str:
    return "gate_up_proj" if experts.has_gate else "up_proj"


def _products(experts: Any, name: str, make: MakeProduct) -> Iterator[PackedProduct]:
    """Yield the product of each expert; then leave a tensor without data, for code that reads the weight's type."""
    weight = experts._parameters.pop(name).detach()  # noqa: SLF001
    biases = getattr(experts, f"{name}_bias", None) if experts.has_bias else None
    for expert, one in enumerate(weight.transpose(1, 2) if experts.is_transposed else weight):
        yield make(one.contiguous(), None if biases is None else biases[expert])
    setattr(experts, name, torch.empty_like(weight, device="meta"))


def _multiply(
    products: Sequence[PackedProduct], rows: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor:
    """Multiply rows, sorted by expert, by the experts' products; `counts` are the rows of each expert."""
    parts = zip(products, rows.split(counts), strict=True)
    return torch.cat([product(part) for product, part in parts if len(part)])
