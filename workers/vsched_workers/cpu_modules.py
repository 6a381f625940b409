"""Modules that compute on the CPU what transformers' modules compute, faster.

oneDNN lays a bfloat16 weight out anew at every call unless it was told the layout before. Packing it once makes the few
rows of a decode step up to twice as fast, and the result is the same to the bit. float32 is left alone: for the small
layers packing loses, and the result is not the same to the bit.

A convolution whose stride is its kernel is a matrix product of what it is given; written as one it takes a third of the
time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class PackedWeight:
    """A weight [out, in] in the layout that oneDNN multiplies with."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        operations: Any = torch.ops.mkldnn
        self._multiply: Any = operations._linear_pointwise  # noqa: SLF001  # torch offers it under this name only
        self._packed: torch.Tensor = operations._reorder_linear_weight(weight)  # noqa: SLF001
        self._bias = bias
        self.size_bytes = weight.numel() * weight.element_size()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows [..., in]; returns [..., out]."""
        result: torch.Tensor = self._multiply(rows, self._packed, self._bias, "none", [], "")
        return result


class PackedLinear(nn.Module):
    """A linear layer over a packed weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.packed = PackedWeight(linear.weight, linear.bias)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.packed(rows)


class FlatPatches(nn.Module):
    """The patch embedding as a matrix product, in place of a convolution."""

    def __init__(self, convolution: nn.Conv3d) -> None:
        super().__init__()
        self.weight = nn.Parameter(convolution.weight.flatten(1).contiguous(), requires_grad=False)
        self.bias = convolution.bias

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Project patches [patches, channels, time, height, width]; returns [patches, hidden, 1, 1, 1]."""
        rows = functional.linear(patches.flatten(1), self.weight, self.bias)
        return rows[:, :, None, None, None]


def packs(device: str, dtype: torch.dtype) -> bool:
    """Return whether packing helps on this device with this type."""
    return device == "cpu" and dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()


def pack_linears(module: nn.Module) -> int:
    """Pack every linear layer below a module; return the bytes of the packed weights."""
    size = 0
    for child in list(module.modules()):
        for name, linear in list(child.named_children()):
            if isinstance(linear, nn.Linear):
                packed = PackedLinear(linear)
                setattr(child, name, packed)
                size += packed.packed.size_bytes
    return size


def flatten_patches(tower: nn.Module) -> None:
    """Replace the patch embedding's convolution where it is nothing but a matrix product."""
    embedding: Any = getattr(tower, "patch_embed", None)
    convolution = getattr(embedding, "proj", None)
    if (
        isinstance(convolution, nn.Conv3d)
        and convolution.kernel_size == convolution.stride
        and convolution.groups == 1
        and not any(convolution.padding)
    ):
        embedding.proj = FlatPatches(convolution)
