"""Products with packed weights: bfloat16 pairs in panels, tiles with AMX, or weights that are widened as they are read.

The last are quantized weights, or bfloat16 on processors without VDPBF16PS. There they take a third of the time of
oneDNN's bfloat16 product with AVX-512, and a tenth of torch's with AVX2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.cpu.kernels.gemm import PANEL as PAIR_PANEL
from vsched_workers.backends.cpu.kernels.gemm import WEIGHT
from vsched_workers.backends.cpu.kernels.gemm import multiply as multiply_pairs
from vsched_workers.backends.cpu.kernels.packing import pack, reorder_nibbles
from vsched_workers.backends.cpu.kernels.quantizing import find_largest, round_int4
from vsched_workers.backends.cpu.kernels.simd import LINE, has_bf16_dot
from vsched_workers.backends.cpu.quantized.block_sums import (
    PLAIN,
    ROW_BLOCK,
    VECTORS,
    instructions,
)
from vsched_workers.backends.cpu.quantized.integers import multiply_int8
from vsched_workers.backends.cpu.quantized.kernel import (
    BF16_ROWS,
    BLOCK,
    FLOAT16_SCALES,
    FLOAT32_ROWS,
    FLOAT32_SCALES,
    FP8_FACTOR,
    INPUTS,
    KINDS,
    PANEL,
    multiply,
)
from vsched_workers.backends.cpu.quantized.widened import ROWS_MIN, multiply_widened
from vsched_workers.backends.cpu.threads import pool_of
from vsched_workers.backends.cpu.tiles.kernel import HALF, has_tiles, multiply_in_tiles
from vsched_workers.backends.reference.packed_weights import PackedProduct, Weight, room_for_weights
from vsched_workers.memory.sparse_runs import at_most
from vsched_workers.quantized.schemes import FOUR_BITS, INTEGERS
from vsched_workers.quantized.weights import (
    FP4_NUMBERS,
    INT4_CENTRE,
    QuantizedWeight,
    candidate_scales,
)

_PACKED_BYTES = 1 << 24
"""Bytes that are packed at once: limits the memory in use besides the weight and its panels."""
UNSCALED = ("bfloat16", "float32")
"""Kinds of weights without scales."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integer type of each number of bytes."""


class KernelProduct(PackedProduct):
    """Product by a kernel of this package, with the arguments of `gemm.multiply`.

    Attributes:
        size_bytes: Bytes of the padded weight, including its scales.
        kernel: Kernel for few rows.
        many_rows_kernel: Kernel for at least `many_rows_min` rows of bfloat16.
        many_rows_min: Minimum rows of that kernel; unlimited if it is the same.
        tags: Dtype tags that select the compiled variants, after that of the rows.
        weight: The packed weight, `WEIGHT` [1].
        has_order: Whether inputs are permuted first.
    """

    has_order = False
    kernel: Any
    many_rows_kernel: Any
    tags: tuple[npt.NDArray[Any], ...]

    def __init__(self, threads: int, panel: int, **weight: float) -> None:
        """Take the threads, the outputs of a panel, and fields of `WEIGHT`."""
        self._pool, self._enough = pool_of(threads), threads * panel
        self.weight = np.zeros(1, dtype=WEIGHT)
        for name, value in weight.items():
            self.weight[name] = value

    def multiply_rows(self, dtype: torch.dtype, rows_at: int, count: int, result_at: int) -> None:
        singles = dtype == torch.float32
        kernel = self.kernel
        if count >= self.many_rows_min and not singles:
            kernel = self.many_rows_kernel
        tags = (FLOAT32_ROWS if singles else BF16_ROWS, *self.tags)
        wanted = at_most(self.shape[0], self._enough)
        kernel(self._pool, tags, self.weight, rows_at, count, wanted, result_at)


def addresses_of(products: Sequence[KernelProduct]) -> list[tuple[int, int, int]]:
    """Return the addresses of each product's kernels for few and many rows of bfloat16, and the minimum of many.

    A look-up takes half a millisecond, so there is one for each kernel and format.
    """
    found: dict[tuple[object, ...], int] = {}

    def address_of(kernel: Any, product: KernelProduct) -> int:
        key = (kernel, *map(id, product.tags))
        if key not in found:
            found[key] = kernel.address_of((BF16_ROWS, *product.tags))
        return found[key]

    return [
        (address_of(each.kernel, each), address_of(each.many_rows_kernel, each), each.many_rows_min)
        for each in products
    ]


class QuantizedProduct(KernelProduct):
    """Product with a weight that is widened or dequantized; the other rows do not change a row's result, to the bit.

    One exception: with tiles, many rows use another kernel than few.
    """

    def __init__(
        self,
        weight: QuantizedWeight | torch.Tensor,
        bias: torch.Tensor | None,
        *,
        threads: int,
        int8_activations: bool = False,
        tiles: bool = False,
    ) -> None:
        """Take a weight [out, in], quantized or bfloat16, and pack a copy.

        With `int8_activations` activations are quantized to int8 if the weight is an integer format. With `tiles`
        many rows of bfloat16 are multiplied in tiles.
        """
        weight = weight if isinstance(weight, QuantizedWeight) else _unscaled(weight)
        self.shape = weight.shape
        self._order = weight.order
        self.has_order = weight.order is not None
        self._kind, self._dtype = weight.kind, weight.dtype
        outputs, inputs_unpadded = weight.shape
        whole = weight.group >= inputs_unpadded
        fits = weight.kind in INTEGERS and (whole or weight.group % ROW_BLOCK == 0)
        multiple = ROW_BLOCK if fits else INPUTS
        inputs = -(-inputs_unpadded // multiple) * multiple
        group = inputs if whole else weight.group
        assert not group % INPUTS, "groups must be multiples of INPUTS"
        unscaled = weight.kind in UNSCALED
        factor = FP8_FACTOR if weight.kind == "fp8" else 1.0
        self._panels = _pack_values(weight, inputs, threads)
        self._scales = torch.ones(1, 1, PANEL) if unscaled else _pack_scales(weight.scales, factor)
        self._offsets = None if weight.offsets is None else _pack_scales(weight.offsets)
        self._bias = torch.zeros(len(self._panels) * PANEL)
        if bias is not None:
            self._bias[:outputs] = bias
        kept = self._panels, self._scales, self._offsets, self._order
        self.size_bytes = sum(each.nbytes for each in kept if each is not None)
        super().__init__(
            threads,
            PANEL,
            inputs_unpadded=inputs_unpadded,
            inputs=inputs,
            input_bytes=self._panels[0].nbytes // inputs,
            weight_at=self._panels.data_ptr(),
            block=_block_of(group),
            group=group,
            vectors=VECTORS,
            scale_row_bytes=0 if unscaled else self._scales[0, 0].nbytes,
            scales_at=self._scales.data_ptr(),
            offsets_at=0 if self._offsets is None else self._offsets.data_ptr(),
            outputs=outputs,
            bias_at=self._bias.data_ptr(),
            zero_point=INT4_CENTRE if weight.kind == "int4" else 0,
        )
        scale_tag = FLOAT16_SCALES if self._scales.dtype == torch.float16 else FLOAT32_SCALES
        self.tags = KINDS[weight.kind], scale_tag, instructions()
        self.kernel = self.many_rows_kernel = (
            multiply_int8 if fits and int8_activations else multiply
        )
        if tiles and not unscaled:
            assert has_tiles(), "the process must have permission for tiles"
            self.many_rows_kernel, self.many_rows_min = multiply_widened, ROWS_MIN

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows [..., in] of bfloat16 or float32; returns [..., out] of the same type."""
        if self._order is not None:
            rows = rows.index_select(-1, self._order)
        return super().__call__(rows)

    def rows_of(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, dequantized, as for an embedding; indices int64 [n], returns [n, in]."""
        assert self._order is None, "embeddings must not be permuted"
        panel, place = indices // PANEL, indices % PANEL
        inputs, zero_point = self.shape[1], float(self.weight["zero_point"][0])
        together = 4 if self._kind in INTEGERS else 1
        values = self._panels.view(len(self._panels), -1, PANEL, together)[panel, :, place]
        if self._kind in UNSCALED:
            return values.flatten(1)[:, :inputs]
        groups = torch.arange(inputs) // int(self.weight["group"][0])
        scales = self._scales[panel, :, place].float()[:, groups]
        offsets = None if self._offsets is None else self._offsets[panel, :, place].float()
        if self._kind in FOUR_BITS:
            values = torch.stack((values & 15, values >> 4), -2)
        values = values.flatten(1)[:, :inputs]
        if self._kind == "fp4":
            values = FP4_NUMBERS[values.int()]
        if self._kind == "fp8":
            values, scales = values.view(torch.float8_e4m3fn), scales / FP8_FACTOR
        rows = (values.float() - zero_point) * scales
        return (rows if offsets is None else rows + offsets[:, groups]).to(self._dtype)


def quantizes_activations(activations: str, dtype: torch.dtype) -> bool:
    """Return True if activations of a type are quantized to int8 under a configuration: `auto`, `float` or `int8`.

    `auto` never quantizes float32: users choose float32 for tokens that do not depend on the batch, and a difference
    in the last bit of attention can move an int8 value by one.
    """
    if activations == "auto":
        return dtype == torch.bfloat16 and instructions() is not PLAIN
    return activations == "int8"


def widens_in_tiles(settings: WorkerSettings, dtype: torch.dtype) -> bool:
    """Return True if many rows of a type are multiplied in tiles, with dequantized weights.

    Not with int8 activations, nor if the result of a row must not depend on the number of rows.
    """
    wanted = settings.activations != "int8" and not settings.deterministic
    return wanted and dtype == torch.bfloat16 and has_tiles()


def _block_of(group: int) -> int:
    """Inputs of a block: the largest divisor of a group up to `BLOCK` that is a multiple of `INPUTS`, as groups are."""
    if group <= BLOCK:
        return group
    return next(each for each in range(BLOCK, 0, -INPUTS) if not group % each)


def _unscaled(weight: torch.Tensor) -> QuantizedWeight:
    """View a bfloat16 or float32 weight as a quantized one with scale 1."""
    return QuantizedWeight(
        kind=str(weight.dtype).removeprefix("torch."),
        values=weight.detach(),
        scales=torch.empty(0),
        group=weight.shape[1],
        inputs=weight.shape[1],
        dtype=weight.dtype,
    )


def _pack_values(weight: QuantizedWeight, inputs: int, threads: int) -> torch.Tensor:
    """Pack the values of a weight into panels.

      int8 [out, in], PANEL outputs            panel [in / 4, PANEL, 4]

            i0  i1  i2  i3  i4 ..                                 o0               o1           ..  o(PANEL - 1)
      o0    a   b   c   d   e                  i0 .. i3    | a  b  c  d |   | p  q  r  s |
      o1    p   q   r   s   t           ->     i4 .. i7    | e  ..      |   | t  ..      |

    Formats of 4 bits have the same layout with words of eight inputs (`reorder_nibbles`); FP8 and floats have one value
    in place of a word.
    """
    values, columns = weight.values, inputs // 2 if weight.kind in FOUR_BITS else inputs
    made = room_for_weights((-(-len(values) // PANEL), columns * PANEL), values.dtype)
    word = _WORDS[4 if weight.kind in INTEGERS else values.dtype.itemsize]
    panels = made.view(word).view(len(made), -1, PANEL).numpy()
    pool, step = pool_of(threads), max(_PACKED_BYTES // made[0].nbytes, 1)
    for first in range(0, len(made), step):
        some = values[first * PANEL : (first + step) * PANEL]
        if missing := columns - some.shape[1]:
            bits = some.view(torch.uint8) if values.dtype.itemsize == 1 else some
            some = functional.pad(bits, (0, missing))
        rows = some.contiguous().view(word)
        if weight.kind in FOUR_BITS:
            pairs, rows = rows, torch.empty_like(rows)
            reorder_nibbles(pool, pairs.numpy(), rows.numpy())
        pack(pool, rows.numpy(), panels[first : first + step])
    return made


def round_groups(threads: int, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize groups of a weight to int4; see `quantized.weights.RoundGroups`."""
    pool, values = pool_of(threads), groups.contiguous().numpy()
    largest = torch.empty(groups.shape[:2])
    find_largest(pool, values, largest.numpy())
    scales = torch.empty_like(largest)
    pairs = torch.empty(len(groups), groups[0].numel() // 2, dtype=torch.uint8)
    candidates = candidate_scales(largest).float().numpy()
    round_int4(pool, values, candidates, scales.numpy(), pairs.numpy())
    return pairs, scales.half()


def _pack_scales(scales: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Pack scales or offsets [out, groups] into panels, [out / PANEL, groups, PANEL]."""
    scales = scales.float() * factor if factor != 1.0 else scales
    padded: Any = functional.pad(scales, (0, 0, 0, -len(scales) % PANEL))
    panels = padded.unflatten(0, (-1, PANEL)).transpose(1, 2)
    return room_for_weights(panels.shape, panels.dtype).copy_(panels)


class PanelProduct(KernelProduct):
    """GEMM with a packed weight [out, in] of bfloat16: in pairs (`gemm.py`), or in tiles."""

    tags = BF16_ROWS, BF16_ROWS, BF16_ROWS

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, threads: int, *, tiles: bool = False
    ) -> None:
        """Pack a copy of a weight with an even number of inputs.

        With `tiles` the weight is packed into half-panels and multiplied in tiles.
        """
        outputs, inputs = self.shape = (weight.shape[0], weight.shape[1])
        self._panels = _pack(weight, HALF if tiles else PAIR_PANEL, threads)
        self.size_bytes = self._panels.nbytes
        self._bias = torch.zeros(-(-outputs // PAIR_PANEL) * PAIR_PANEL, dtype=torch.bfloat16)
        if bias is not None:
            self._bias[:outputs] = bias
        places = {"weight_at": self._panels.data_ptr(), "bias_at": self._bias.data_ptr()}
        super().__init__(threads, PAIR_PANEL, inputs_unpadded=inputs, outputs=outputs, **places)
        self.kernel = self.many_rows_kernel = multiply_in_tiles if tiles else multiply_pairs

    def multiply_rows(self, dtype: torch.dtype, rows_at: int, count: int, result_at: int) -> None:
        assert dtype == torch.bfloat16, "rows and weight must be bfloat16"
        super().multiply_rows(dtype, rows_at, count, result_at)

    def rows_of(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, as for an embedding; indices int64 [n], returns [n, in]."""
        width = self._panels.shape[2]
        return self._panels[indices // width, :, indices % width].view(torch.bfloat16)


def make_product(
    weight: Weight,
    bias: torch.Tensor | None,
    *,
    threads: int,
    int8_activations: bool = False,
    tiles: bool = False,
    deterministic: bool = False,
) -> PanelProduct | QuantizedProduct:
    """Return the product by a weight, of which it packs a copy.

    `int8_activations` and `tiles` are as in `QuantizedProduct`; bfloat16 weights use tiles whenever the processor has
    them. With `deterministic` no product uses tiles.
    """
    tiles = tiles and not deterministic
    if isinstance(weight, torch.Tensor) and weight.dtype == torch.bfloat16:
        in_tiles = has_tiles() and not deterministic
        if (has_bf16_dot() or in_tiles) and weight.shape[1] % 2 == 0:
            return PanelProduct(weight, bias, threads, tiles=in_tiles)
    return QuantizedProduct(
        weight, bias, threads=threads, int8_activations=int8_activations, tiles=tiles
    )


def _pack(weight: torch.Tensor, width: int, threads: int) -> torch.Tensor:
    """Pack a weight into panels of `width` outputs, the last one padded with zeros.

      weight [N, K]                            packed [N / width, K / 2, width, 2]

            k0   k1   k2   k3  ..                          n0      n1      n2     ..   n(width - 1)
      n0    a    b    c    d                   k0, k1    a  b    e  f    i  j
      n1    e    f    g    h           ->      k2, k3    c  d    g  h    k  l
      n2    i    j    k    l                     ..
      ..                                       then the panel of outputs width .. 2 width - 1

    A line of this diagram is `width` / 16 vectors of 64 bytes.
    """
    outputs, inputs = weight.shape
    panels = room_for_weights((-(-outputs // width), inputs // 2, width), torch.int32)
    pairs = weight.detach().contiguous().view(torch.int32)
    pack(pool_of(threads), pairs.numpy(), panels.numpy())
    assert not panels.data_ptr() % LINE, "panels must be aligned to cache lines"
    return panels
