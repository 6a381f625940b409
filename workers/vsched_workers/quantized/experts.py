"""Mixtures of experts with a product for each expert's weights, packed or quantized, in place of transformers' module.

torch multiplies grouped bfloat16 matrices on a CPU without AVX512-BF16 at a tenth of the rate of packed products, and
transformers keeps the weights of experts in one tensor, which the packing of linear layers does not see.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vsched_workers.quantized.layers import MakeProduct
from vsched_workers.quantized.weights import QuantizedWeight

Multiply = Callable[[torch.Tensor], torch.Tensor]
"""Multiplies activations [..., in] by a weight."""

MultiplyEach = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""Multiplies rows [rows, in], sorted by expert, by the weights of experts; the numbers are the rows of each expert."""


def one_by_one(products: Sequence[Multiply]) -> MultiplyEach:
    """Return the function that multiplies by the products of experts, one after the other."""

    def multiply_each(rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        found, first = [], 0
        for product, count in zip(products, counts, strict=True):
            if count:
                found.append(product(rows[first : first + count]))
                first += count
        return torch.cat(found)

    return multiply_each


Together = Callable[[Sequence[Any]], MultiplyEach]
"""Returns the function that multiplies by the products of experts, such as `one_by_one`."""


class ExpertProducts:
    """The forward pass of an experts module: transformers' `grouped_mm` over a product for each weight.

    The result of a row does not depend on the other rows.

    Attributes:
        products: All products.
    """

    def __init__(
        self, experts: Any, make: Callable[..., Multiply], together: Together = one_by_one
    ) -> None:
        """Make the products of a module of transformers from weights and biases; its parameters are removed."""
        self._experts = experts
        inner, outer = (
            [make(*each) for each in _weights(experts, name)] for name in parameters_of(experts)
        )
        self._inner, self._outer = together(inner), together(outer)
        self.products: Sequence[Any] = [*inner, *outer]

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Run rows [rows, hidden] through their chosen experts, [rows, choices]; return the weighted sums."""
        experts, (rows, choices) = self._experts, top_k_index.shape
        if not rows:  # experts for images in a step of text alone
            return torch.empty_like(hidden_states)
        chosen = top_k_index.reshape(-1)
        order = torch.argsort(chosen, stable=True)
        counts = torch.bincount(chosen, minlength=experts.num_experts).tolist()
        values = self._inner(hidden_states[order // choices], counts)
        values = experts._apply_gate(values) if experts.has_gate else experts.act_fn(values)  # noqa: SLF001
        values = self._outer(values, counts)
        if experts.has_post_expert_norm:
            values = experts.post_expert_norm(values)
        found = torch.empty_like(values)
        found[order] = values
        weighted = found.view(rows, choices, -1) * top_k_weights[..., None]
        return weighted.sum(1).to(hidden_states.dtype)


def mixtures(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules, with their names, that transformers runs by its experts interface, with whole experts."""
    for name, child in module.named_modules():
        if getattr(child, "_is_expert_parallel", None) is False:
            yield name, child


def parameters_of(experts: Any) -> tuple[str, str]:
    """Return the names of the parameters of a mixture's first and second products."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def take_parameter(experts: Any, parameter: str) -> torch.Tensor:
    """Remove a parameter; a tensor without data remains, for code that reads its type."""
    weight: torch.Tensor = experts._parameters.pop(parameter).detach()  # noqa: SLF001
    setattr(experts, parameter, torch.empty_like(weight, device="meta"))
    return weight


def use_quantized(experts: Any, weights: Mapping[str, Sequence[QuantizedWeight]]) -> None:
    """Let a mixture compute with quantized weights of its parameters, which were taken out."""
    experts.quantized = weights
    experts.forward = ExpertProducts(
        experts, lambda *each: functools.partial(_multiply_dequantized, *each)
    )


def use_dequantized(
    experts: Any, weights: Mapping[str, Sequence[QuantizedWeight]], device: str
) -> None:
    """Restore parameters that were taken out, from quantized weights."""
    for name, quantized in weights.items():
        dtype = getattr(experts, name).dtype
        plain = torch.stack([each.dequantized().to(dtype) for each in quantized])
        plain = plain.transpose(1, 2).contiguous() if experts.is_transposed else plain
        delattr(experts, name)
        setattr(experts, name, nn.Parameter(plain.to(device), requires_grad=False))


def is_quantized(module: nn.Module) -> bool:
    """Return whether a module is a mixture of experts with quantized weights that are not packed yet."""
    return "quantized" in vars(module)


def pack_experts(
    module: nn.Module, make: MakeProduct, together: Together = one_by_one
) -> list[ExpertProducts]:
    """Replace the forward passes of the mixtures of experts below a module, and return the new ones."""
    packed = []
    for _, experts in _unpacked(module):
        experts.forward = ExpertProducts(experts, make, together)
        vars(experts).pop("quantized", None)
        packed.append(experts.forward)
    return packed


def expert_names(module: nn.Module) -> list[str]:
    """Return the names of the experts' weights below a module that get packed."""
    return [
        f"{name}.{weight}"
        for name, experts in _unpacked(module)
        for weight in parameters_of(experts)
    ]


def _unpacked(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, experts in mixtures(module):
        if "forward" not in vars(experts) or is_quantized(experts):
            yield name, experts


def _weights(
    experts: Any, name: str
) -> Iterator[tuple[torch.Tensor | QuantizedWeight, torch.Tensor | None]]:
    """Yield weight [out, in] and bias of each expert."""
    biases = getattr(experts, f"{name}_bias", None) if experts.has_bias else None
    weights = (
        vars(experts)["quantized"][name] if is_quantized(experts) else take_parameter(experts, name)
    )
    if isinstance(weights, torch.Tensor):
        weights = weights.transpose(1, 2) if experts.is_transposed else weights
    for expert, one in enumerate(weights):
        weight = one.contiguous() if isinstance(one, torch.Tensor) else one
        yield weight, None if biases is None else biases[expert]


def _multiply_dequantized(
    weight: QuantizedWeight, bias: torch.Tensor | None, rows: torch.Tensor
) -> torch.Tensor:
    return functional.linear(rows, weight.dequantized().to(rows), bias)
