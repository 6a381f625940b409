"""Weights packed for oneDNN: bit-exact to transformers' modules, and faster.

oneDNN repacks a bfloat16 weight at every call unless it is given in its own layout. Packing it once makes the small
products of a decode step up to twice as fast, with bit-identical results. float32 weights are not packed: packing slows
small layers down, and the result differs in the last bits.

oneDNN also compiles its product for every M that it meets, and keeps the code: a few hundred prompt lengths cost a
gigabyte, long after the memory was divided up. So packed weights are used with few values of M only: blocks of the
largest, and a remainder padded to the next size; likewise the one activation that oneDNN computes. A backend may have a
custom product for small M, or for all M if it is faster (`backends/cpu/products.py`), which takes any M.

A convolution whose stride equals its kernel size is a matrix product; computed as one it takes a third of the time.
"""

from __future__ import annotations

import bisect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard, TypeVar

import torch
from torch import nn
from torch.nn import functional

from vsched_workers.backends.reference.host_memory import HugePages
from vsched_workers.memory.sparse_runs import is_sparse, pieces, room_for
from vsched_workers.quantized.layers import QuantizedLinear
from vsched_workers.quantized.weights import QuantizedWeight

FEW_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Values of M for steps in which small M matters; the last one is oneDNN's block size."""

MANY_ROWS = (16, 64, 128, 256)
"""Values of M for hundreds of rows."""

_EVEN_STEP = 32
"""Blocks of about equal size are a multiple of this."""

Weight = torch.Tensor | QuantizedWeight
Layer = TypeVar("Layer", bound=nn.Module)

READ_DIRECTLY = ("dt_proj",)
"""Layers that are not called: a Mamba mixer uses their weight directly."""


class CustomProduct(Protocol):
    """A product for any M.

    Attributes:
        many_rows_min: The smallest M with a second kernel.
        block_rows: The largest M for one call that is worthwhile.
        size_bytes: Bytes of the weight.
    """

    many_rows_min: int
    block_rows: int
    size_bytes: int

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply activations [..., in]; return [..., out]."""
        ...


MakeCustom = Callable[[Weight, torch.Tensor | None], CustomProduct | None]
"""Build a product from a weight and its bias; return None if it is not supported."""


_huge_pages = HugePages()


def room_for_weights(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeroed memory for a weight, in huge pages, aligned to a cache line."""
    found = _huge_pages.take(math.prod(shape) * dtype.itemsize)
    return torch.from_numpy(found).view(dtype).view(*shape)


def padded_rows(rows: int, sizes: Sequence[int] = FEW_ROWS, custom: int = 0) -> int:
    """Return M padded to blocks and a remainder of one of the sizes.

    A remainder of at most `custom`, the largest M of a custom product, is not padded.
    """
    whole, rest = divmod(rows, sizes[-1])
    if rest > custom:
        rest = sizes[bisect.bisect_left(sizes, rest)]
    return whole * sizes[-1] + rest


def block_starts(count: int, block_rows: int, custom: int) -> range:
    """Return the starts of the blocks of at most `block_rows` rows that a product is split into.

    Each block reads the whole weight. If a custom product, for up to `custom` rows, takes them all, blocks are of about
    equal size. Sparse runs use a block of maximum size: another M may need one.
    """
    if count <= block_rows or custom < count or is_sparse():
        return range(0, count, block_rows)
    even = -(-count // -(-count // block_rows))
    return range(0, count, min(-(-even // _EVEN_STEP) * _EVEN_STEP, block_rows))


class PackedWeight:
    """A weight [out, in], packed for its product.

    Attributes:
        custom: The product for small M, or for all; None if there is none.
        block_rows: The largest M of one call.
    """

    def __init__(
        self,
        weight: Weight,
        bias: torch.Tensor | None,
        sizes: Sequence[int] = FEW_ROWS,
        make_custom: MakeCustom | None = None,
    ) -> None:
        operations: Any = torch.ops.mkldnn
        self._multiply: Any = operations._linear_pointwise  # noqa: SLF001  # torch offers it under this name only
        self._bias = bias
        self.shape = (weight.shape[0], weight.shape[1], bias is not None)
        self.custom = make_custom(weight, bias) if make_custom is not None else None
        if self.custom is None:
            assert isinstance(weight, torch.Tensor), (
                "quantized weights without a kernel are refused before"
            )
            self._packed = operations._reorder_linear_weight(weight)  # noqa: SLF001
            self.custom_rows_max, self.size_bytes = 0, weight.nbytes
        else:
            self.custom_rows_max, self.size_bytes = sys.maxsize, self.custom.size_bytes
        self._type = weight.dtype
        self._sizes = sizes
        self.block_rows = sizes[-1] if self.custom is None else self.custom.block_rows
        self._exact = frozenset(sizes)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply activations [..., in]; return [..., out]."""
        count, block = rows.numel() // self.shape[1], self.block_rows
        if self.custom is not None and count <= min(self.custom_rows_max, block):
            return self.custom(rows)
        if count in self._exact:
            exact: torch.Tensor = self._multiply(rows, self._packed, self._bias, "none", [], "")
            return exact
        flat = rows.reshape(-1, self.shape[1])
        if count <= block:
            result = self._product(flat)
        else:
            result = room_for(flat, count, self.shape[0])
            starts = block_starts(count, block, self.custom_rows_max)
            for start in pieces(starts):
                stop = start + starts.step
                result[start:stop] = self._product(flat[start:stop])
        return result.view(*rows.shape[:-1], self.shape[0])

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply at most one block of rows."""
        count = len(rows)
        if self.custom is not None and count <= self.custom_rows_max:
            return self.custom(rows)
        wanted = padded_rows(count, self._sizes)
        if wanted > count:
            rows = functional.pad(rows, (0, 0, 0, wanted - count))
        result: torch.Tensor = self._multiply(rows, self._packed, self._bias, "none", [], "")
        return result[:count]

    def warm_up(self) -> None:
        """Compile all kernels for this weight."""
        counts = [size for size in self._sizes if size > self.custom_rows_max]
        if self.custom is not None:
            # A custom product has one kernel for any M, or one for small and one for large M.
            counts += [1, *[each for each in [self.custom.many_rows_min] if each < self._sizes[-1]]]
        for count in counts:
            self._product(torch.zeros(count, self.shape[1], dtype=self._type))


class PackedLinear(nn.Module):
    """A linear layer over a packed weight."""

    def __init__(
        self,
        linear: nn.Linear,
        sizes: Sequence[int] = FEW_ROWS,
        make_custom: MakeCustom | None = None,
    ) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.packed = PackedWeight(linear.weight, linear.bias, sizes, make_custom)
        # For models that read its data type; computing with it is an error.
        self.weight = torch.empty(
            linear.out_features, linear.in_features, dtype=linear.weight.dtype, device="meta"
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.packed(rows)


class FlatPatches(nn.Module):
    """The patch embedding as a matrix product, in place of a convolution."""

    def __init__(
        self, convolution: nn.Conv3d, make_custom: MakeCustom | None, *, pack: bool
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(convolution.weight.flatten(1).contiguous(), requires_grad=False)
        self.bias = convolution.bias
        self.packed = PackedWeight(self.weight, self.bias, MANY_ROWS, make_custom) if pack else None

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Project patches [patches, channels, time, height, width]; returns [patches, hidden, 1, 1, 1]."""
        flat = patches.flatten(1)
        if self.packed is not None:
            return self.packed(flat)[:, :, None, None, None]
        return functional.linear(flat, self.weight, self.bias)[:, :, None, None, None]


class BlockedActivation(nn.Module):
    """An activation over few sizes: the code that oneDNN compiles for a size takes 256 KiB, and is kept."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the activation of values [..., width]."""
        flat, block = values.reshape(-1, values.shape[-1]), MANY_ROWS[-1]
        result = torch.empty_like(flat)
        for start in range(0, len(flat), block):
            rows = flat[start : start + block]
            missing = padded_rows(len(rows), MANY_ROWS) - len(rows)
            padded = functional.pad(rows, (0, 0, 0, missing)) if missing else rows
            result[start : start + block] = self.activation(padded)[: len(rows)]
        return result.view(values.shape)


def packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN packs weights of this type: bfloat16, on processors with AVX-512 or the like."""
    operations: Any = torch.ops.mkldnn
    return dtype == torch.bfloat16 and operations._is_mkldnn_bf16_supported()  # noqa: SLF001


def block_activations(module: nn.Module) -> None:
    """Restrict the sizes of activations that oneDNN computes (GELU without `tanh`) below a module."""
    # Modules of transformers have imported it already; an import here would take seconds.
    library: Any = sys.modules.get("transformers.activations")
    for child in list(module.modules()):
        for name, activation in list(child.named_children()):
            exact = isinstance(activation, nn.GELU) and activation.approximate == "none"
            if exact or (library is not None and isinstance(activation, library.GELUActivation)):
                setattr(child, name, BlockedActivation(activation))


def pack_linears(
    module: nn.Module, sizes: Sequence[int] = FEW_ROWS, make_custom: MakeCustom | None = None
) -> int:
    """Pack every linear layer below a module; return the bytes of the packed weights."""
    packed = replace_linears(module, lambda linear: PackedLinear(linear, sizes, make_custom))
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
def warm_up(module: nn.Module, *others: PackedWeight) -> None:
    """Compile the kernels of all packed weights below a module, and of others; weights of one shape share them."""
    weights = [*others]
    for child in module.modules():
        packed = getattr(child, "packed", None)
        if isinstance(packed, PackedWeight):
            weights.append(packed)
    for weight in {weight.shape: weight for weight in weights}.values():
        weight.warm_up()


def flatten_patches(tower: nn.Module, make_custom: MakeCustom | None = None, *, pack: bool) -> None:
    """Replace the convolution of the patch embedding if it is equivalent to a matrix product."""
    embedding: Any = getattr(tower, "patch_embed", None)
    convolution = getattr(embedding, "proj", None)
    if (
        isinstance(convolution, nn.Conv3d)
        and convolution.kernel_size == convolution.stride
        and convolution.groups == 1
        and not any(convolution.padding)
    ):
        embedding.proj = FlatPatches(convolution, make_custom, pack=pack)
