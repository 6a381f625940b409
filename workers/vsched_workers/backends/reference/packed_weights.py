"""Weights in the layout that oneDNN multiplies with: the result of transformers' modules to the bit, sooner.

oneDNN lays a bfloat16 weight out anew at every call unless it was told the layout before. Packing it once makes the few
rows of a decode step up to twice as fast, and the result is the same to the bit. float32 is left alone: for the small
layers packing loses, and the result is not the same to the bit.

oneDNN also compiles its product for every number of rows that it meets, and keeps what it compiled: a few hundred
lengths of prompts cost a gigabyte, long after the memory was shared out. So a packed weight is multiplied with a few
numbers of rows only: blocks of the largest, and a rest that is padded to the next one; so does the one activation
that oneDNN computes. Few rows, or all where that is faster, have a custom product where a backend makes one
(`backends/cpu/products.py`), which takes any number.

A convolution whose stride is its kernel is a matrix product of what it is given; written as one it takes a third of the
time.
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
"""Numbers of rows to multiply with where steps of few rows count; the last one is the size of a block of oneDNN's."""

MANY_ROWS = (16, 64, 128, 256)
"""The same where there are hundreds of rows."""

_EVEN_STEP = 32
"""Blocks of about the same size are of a multiple of this."""

Weight = torch.Tensor | QuantizedWeight
Layer = TypeVar("Layer", bound=nn.Module)

READ_DIRECTLY = ("dt_proj",)
"""Layers that are not called: a Mamba mixer multiplies by the weight of its own accord."""


class CustomProduct(Protocol):
    """A product that takes any number of rows.

    Attributes:
        many_rows_min: Fewest rows that it has another kernel for.
        block_rows: Most rows that it is worth using for at once.
        size_bytes: Bytes of the weight.
    """

    many_rows_min: int
    block_rows: int
    size_bytes: int

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows [..., in]; returns [..., out]."""
        ...


MakeCustom = Callable[[Weight, torch.Tensor | None], CustomProduct | None]
"""Makes a product from a weight and its bias, or None where there cannot be one."""


_huge_pages = HugePages()


def room_for_weights(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return memory for weights, of zeros, in huge pages; it begins at a line of the cache."""
    found = _huge_pages.take(math.prod(shape) * dtype.itemsize)
    return torch.from_numpy(found).view(dtype).view(*shape)


def padded_rows(rows: int, sizes: Sequence[int] = FEW_ROWS, custom: int = 0) -> int:
    """Return the number of rows that `rows` are padded to: blocks, and a rest of one of the sizes.

    A rest of at most `custom`, the most rows of a custom product, stays as it is.
    """
    whole, rest = divmod(rows, sizes[-1])
    if rest > custom:
        rest = sizes[bisect.bisect_left(sizes, rest)]
    return whole * sizes[-1] + rest


def block_starts(count: int, block_rows: int, custom: int) -> range:
    """Return where the blocks begin that so many rows are multiplied in, of at most `block_rows`.

    Each block reads the weight. Where a custom product, of at most `custom` rows, takes them all, they are of about the
    same size. A sparse run has one of the largest: another number of rows may come in one.
    """
    if count <= block_rows or custom < count or is_sparse():
        return range(0, count, block_rows)
    even = -(-count // -(-count // block_rows))
    return range(0, count, min(-(-even // _EVEN_STEP) * _EVEN_STEP, block_rows))


class PackedWeight:
    """A weight [out, in] in the layout that it is multiplied with.

    Attributes:
        custom: The product of few rows, or of all; None where there is none.
        block_rows: Most rows that are multiplied at once.
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
                "a quantised one is refused where it has no product"
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
        """Multiply rows [..., in]; returns [..., out]."""
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
        """Multiply at most a block of rows."""
        count = len(rows)
        if self.custom is not None and count <= self.custom_rows_max:
            return self.custom(rows)
        wanted = padded_rows(count, self._sizes)
        if wanted > count:
            rows = functional.pad(rows, (0, 0, 0, wanted - count))
        result: torch.Tensor = self._multiply(rows, self._packed, self._bias, "none", [], "")
        return result[:count]

    def warm_up(self) -> None:
        """Compile all that will ever be needed."""
        counts = [size for size in self._sizes if size > self.custom_rows_max]
        if self.custom is not None:
            # It is one kernel for any number of rows, or one for few and one for many.
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
        # For models that ask for its type; to compute with it is an error.
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
    """An activation over few numbers of rows: what oneDNN compiles for one takes 256 KiB, and is kept."""

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
    """Have each activation below a module that oneDNN computes, which is GELU without `tanh`, see few shapes only."""
    # A module of transformers comes from where it is imported already; the import takes seconds.
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
    """Replace the linear layers below a module by what is made of each; return that. None leaves one as it is."""
    replaced = []
    for child in list(module.modules()):
        for name, linear in list(child.named_children()):
            if is_packed(linear, name) and (layer := make(linear)) is not None:
                _keep_hooks(layer, linear)
                setattr(child, name, layer)
                replaced.append(layer)
    return replaced


def packed_names(module: nn.Module) -> list[str]:
    """Return the names of the weights below a module that are packed."""
    return [f"{name}.weight" for name, child in module.named_modules() if is_packed(child, name)]


def is_packed(module: nn.Module, name: str) -> TypeGuard[nn.Linear]:
    """Return whether a module of this name is a linear layer that is packed."""
    # What derives from it computes something else.
    return (
        type(module) in {nn.Linear, QuantizedLinear}
        and name.rpartition(".")[2] not in READ_DIRECTLY
    )


def _keep_hooks(packed: nn.Module, linear: nn.Linear) -> None:
    """Have a packed layer do what was hung on the one it replaces: ranks that share a model add up in hooks."""
    packed._forward_pre_hooks.update(linear._forward_pre_hooks)  # noqa: SLF001  # torch has no name for this
    packed._forward_hooks.update(linear._forward_hooks)  # noqa: SLF001
    for name, parameter in linear.named_parameters(recurse=False):
        if name not in {"weight", "bias"}:
            packed.register_parameter(name, parameter)


@torch.inference_mode()
def warm_up(module: nn.Module, *others: PackedWeight) -> None:
    """Compile what the packed weights below a module, and others, will ever need; those of one shape share it."""
    weights = [*others]
    for child in module.modules():
        packed = getattr(child, "packed", None)
        if isinstance(packed, PackedWeight):
            weights.append(packed)
    for weight in {weight.shape: weight for weight in weights}.values():
        weight.warm_up()


def flatten_patches(tower: nn.Module, make_custom: MakeCustom | None = None, *, pack: bool) -> None:
    """Replace the patch embedding's convolution where it is nothing but a matrix product."""
    embedding: Any = getattr(tower, "patch_embed", None)
    convolution = getattr(embedding, "proj", None)
    if (
        isinstance(convolution, nn.Conv3d)
        and convolution.kernel_size == convolution.stride
        and convolution.groups == 1
        and not any(convolution.padding)
    ):
        embedding.proj = FlatPatches(convolution, make_custom, pack=pack)
