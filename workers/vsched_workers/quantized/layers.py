"""Linear layers whose weights a checkpoint has quantised: found, read, merged and cut apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vsched_workers.quantized.schemes import Scheme
from vsched_workers.quantized.weights import QuantizedWeight, merged_weights


class QuantizedLinear(nn.Linear):
    """A linear layer over a quantised weight; it computes with what that stands for until a backend packs it."""

    def __init__(self, linear: nn.Linear, weight: QuantizedWeight | None = None) -> None:
        """Stand in for a layer, of which the bias stays."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.quantized = weight

    @property
    def weight(self) -> Any:  # type: ignore[override]  # not a tensor
        """The quantised weight."""
        return self.quantized

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows [..., in]; returns [..., out]."""
        assert self.quantized is not None, "it has its weight"
        return functional.linear(rows, self.quantized.dequantized().to(rows.dtype), self.bias)


def find_quantized(module: nn.Module, scheme: Scheme, has: Callable[[str], bool]) -> None:
    """Replace the linear layers below a module, on the meta device, of which a checkpoint has a quantised weight."""
    for parent_name, parent in list(module.named_modules()):
        for name, child in list(parent.named_children()):
            full = f"{parent_name}.{name}" if parent_name else name
            if type(child) is nn.Linear and any(has(f"{full}.{end}") for end in scheme.known_by):
                setattr(parent, name, QuantizedLinear(child))


def merged_quantized(linears: Sequence[nn.Linear]) -> QuantizedLinear | None:
    """Return one layer of several of one form, its biases left out; None where they are of several, or plain."""
    weights = [each.quantized for each in linears if isinstance(each, QuantizedLinear)]
    found = [each for each in weights if each is not None]
    if len(found) < len(linears) or len({each.form for each in found}) > 1:
        return None
    outputs = sum(each.out_features for each in linears)
    shape = nn.Linear(linears[0].in_features, outputs, bias=False, device="meta")
    return QuantizedLinear(shape, merged_weights(found))


def plain_weight(linear: nn.Linear) -> torch.Tensor:
    """Return the weight of a layer as it is, or what it stands for."""
    if isinstance(linear, QuantizedLinear):
        assert linear.quantized is not None, "it has its weight"
        return linear.quantized.dequantized().to(linear.quantized.dtype)
    return linear.weight
