"""Linear layers whose weights are packed for a backend's own kernels.

A convolution whose stride equals its kernel size is a matrix product; computed as one it takes a third of the time.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn
from torch.nn import functional

from vsched_workers.backends.reference.host_memory import HugePages
from vsched_workers.batching.pause_points import report_computed
from vsched_workers.memory.sparse_runs import is_sparse, pieces, room_for
from vsched_workers.quantized.layers import READ_DIRECTLY, QuantizedLinear
from vsched_workers.quantized.weights import QuantizedWeight

BLOCK_ROWS = 1024
"""Maximum M of one product: each block reads the whole weight; more activations leave the cache."""

_EVEN_STEP = 32
"""Blocks of about equal size are a multiple of this."""

Weight = torch.Tensor | QuantizedWeight
Layer = TypeVar("Layer", bound=nn.Module)


class PackedProduct(ABC):
    """Product with a packed weight; the result of a row does not depend on the other rows.

    Attributes:
        shape: Outputs and inputs of the weight.
        size_bytes: Bytes of the weight.
        many_rows_min: The smallest M with a second kernel; unlimited if there is none.
    """

    shape: tuple[int, int]
    size_bytes: int
    many_rows_min: int = sys.maxsize

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply activations [..., in]; return [..., out]."""
        rows = rows.contiguous()
        outputs, inputs = self.shape
        count = rows.numel() // inputs
        # Skipped outputs must be defined numbers: tokens are sampled from logits.
        result = room_for(rows, *rows.shape[:-1], outputs)
        rows_at, result_at, size = rows.data_ptr(), result.data_ptr(), rows.itemsize
        starts = block_starts(count)
        for start in pieces(starts):
            some = min(starts.step, count - start)
            at, to = rows_at + start * inputs * size, result_at + start * outputs * size
            self.multiply_rows(rows.dtype, at, some, to)
            report_computed(2.0 * some * inputs * outputs)
        return result

    @abstractmethod
    def multiply_rows(self, dtype: torch.dtype, rows_at: int, count: int, result_at: int) -> None:
        """Multiply `count` rows of a type at an address, and write the results to another."""

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernels for rows of a type."""
        for count in {1, *([self.many_rows_min] if self.many_rows_min < BLOCK_ROWS else [])}:
            self(torch.zeros(count, self.shape[1], dtype=dtype))


MakeProduct = Callable[[Weight, torch.Tensor | None], PackedProduct]
"""Build a product from a weight and its bias."""


_huge_pages = HugePages()


def room_for_weights(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeroed memory for a weight, in huge pages, aligned to a cache line."""
    found = _huge_pages.allocate_bytes(math.prod(shape) * dtype.itemsize)
    return torch.from_numpy(found).view(dtype).view(*shape)


def block_starts(count: int) -> range:
    """Return the starts of the blocks of about equal size that M rows are split into.

    Sparse runs use blocks of maximum size.
    """
    if count <= BLOCK_ROWS or is_sparse():
        return range(0, count, BLOCK_ROWS)
    even = -(-count // -(-count // BLOCK_ROWS))
    return range(0, count, min(-(-even // _EVEN_STEP) * _EVEN_STEP, BLOCK_ROWS))


class PackedLinear(nn.Module):
    """A linear layer over a packed weight."""

    def __init__(self, linear: nn.Linear, make: MakeProduct) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.packed = make(linear.weight, linear.bias)
        # For models that read its data type; computing with it is an error.
        self.weight = torch.empty(
            linear.out_features, linear.in_features, dtype=linear.weight.dtype, device="meta"
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.packed(rows)


class FlatPatches(nn.Module):
    """A patch embedding as a matrix product, in place of a convolution in two or three dimensions."""

    def __init__(self, convolution: nn.Conv2d | nn.Conv3d, make: MakeProduct | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(convolution.weight.flatten(1).contiguous(), requires_grad=False)
        self.bias = convolution.bias
        self.packed = make(self.weight, self.bias) if make is not None else None
        self._sides = convolution.kernel_size

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Project the patches of pixels [n, channels, ...]; returns [n, hidden, patches along each dimension]."""
        for dimension, side in enumerate(self._sides, 2):
            pixels = pixels.unfold(dimension, side, side)
        patches = pixels.movedim(1, -len(self._sides) - 1).flatten(-len(self._sides) - 1)
        if self.packed is None:
            return functional.linear(patches, self.weight, self.bias).movedim(-1, 1)
        return self.packed(patches).movedim(-1, 1)


class BlockedActivation(nn.Module):
    """An activation over few sizes: the code that oneDNN compiles for a size takes 256 KiB, and is kept."""

    SIZES = (16, 64, 128, 256)

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the activation of values [..., width]."""
        flat, block = values.reshape(-1, values.shape[-1]), self.SIZES[-1]
        result = torch.empty_like(flat)
        for start in range(0, len(flat), block):
            rows = flat[start : start + block]
            missing = next(size for size in self.SIZES if size >= len(rows)) - len(rows)
            padded = functional.pad(rows, (0, 0, 0, missing)) if missing else rows
            result[start : start + block] = self.activation(padded)[: len(rows)]
        return result.view(values.shape)


def block_activations(module: nn.Module) -> None:
    """Restrict the sizes of activations that oneDNN computes (GELU without `tanh`) below a module."""
    # Modules of transformers have imported it already; an import here would take seconds.
    library: Any = sys.modules.get("transformers.activations")
    for child in list(module.modules()):
        for name, activation in list(child.named_children()):
            exact = isinstance(activation, nn.GELU) and activation.approximate == "none"
            if exact or (library is not None and isinstance(activation, library.GELUActivation)):
                setattr(child, name, BlockedActivation(activation))


def pack_linears(module: nn.Module, make: MakeProduct) -> int:
    """Pack every linear layer below a module; return the bytes of the packed weights."""
    packed = replace_linears(module, lambda linear: PackedLinear(linear, make))
    return sum(each.packed.size_bytes for each in packed)


def replace_linears(module: nn.Module, make: Callable[[nn.Linear], Layer | None]) -> list[Layer]:
    """Replace the linear layers below a module by `make(layer)`, and return the new ones; None keeps a layer."""
    replaced = []
    for child in list(module.modules()):
        for name, linear in list(child.named_children()):
            if is_packed(linear, name) and (layer := make(linear)) is not None:
                _keep_hooks(layer, linear)
                setattr(child, name, layer)
                replaced.append(layer)
    return replaced


def packed_names(module: nn.Module) -> list[str]:
    """Return the names of the weights below a module that get packed."""
    return [f"{name}.weight" for name, child in module.named_modules() if is_packed(child, name)]


def is_packed(module: nn.Module, name: str) -> TypeGuard[nn.Linear]:
    """Return whether a module of this name is a linear layer that gets packed."""
    # Subclasses may compute something else.
    return (
        type(module) in {nn.Linear, QuantizedLinear}
        and name.rpartition(".")[2] not in READ_DIRECTLY
    )


def _keep_hooks(packed: nn.Module, linear: nn.Linear) -> None:
    """Move hooks from a linear layer to its packed replacement: tensor parallelism sums partial results in hooks."""
    packed._forward_pre_hooks.update(linear._forward_pre_hooks)  # noqa: SLF001  # torch has no name for this
    packed._forward_hooks.update(linear._forward_hooks)  # noqa: SLF001
    for name, parameter in linear.named_parameters(recurse=False):
        if name not in {"weight", "bias"}:
            packed.register_parameter(name, parameter)


@torch.inference_mode()
def warm_up(module: nn.Module, dtype: torch.dtype, *others: PackedProduct) -> None:
    """Compile the kernels of all packed weights below a module, and of others; weights of one shape share them."""
    products = [*others]
    for child in module.modules():
        packed = getattr(child, "packed", None)
        if isinstance(packed, PackedProduct):
            products.append(packed)
    for product in {(type(each), each.shape): each for each in products}.values():
        product.warm_up(dtype)


def flatten_patches(tower: nn.Module, make: MakeProduct | None) -> None:
    """Replace the convolutions below a tower that are equivalent to a matrix product."""
    for child in list(tower.modules()):
        children: list[tuple[str, Any]] = list(child.named_children())
        for name, convolution in children:
            if (
                type(convolution) in {nn.Conv2d, nn.Conv3d}  # a subclass may compute more
                and convolution.kernel_size == convolution.stride
                and convolution.groups == 1
                and convolution.padding in ("valid", (0,) * len(convolution.stride))
                and not any(size > 1 for size in convolution.dilation)
            ):
                setattr(child, name, FlatPatches(convolution, make))
