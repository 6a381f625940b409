"""Matrix products of a linear layer on a GPU: of one row by an own kernel, of more rows by torch.

Launches of compiled Triton kernels without Triton's own dispatch.

For every launch, Triton binds the arguments, derives the specialization from them and looks it up, which takes several
times as long as the launch itself. In eager steps, with several launches per layer, the device then waits for the host.
Here the specialization is looked up by the properties that Triton specializes on: data types, alignment to 16 bytes,
and for integers divisibility by 16 and equality to 1.

Matrix products with quantized weights on a GPU: int8, int4, FP4 and FP8 with group scales.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from vsched_workers.quantized.schemes import FOUR_BITS
from vsched_workers.quantized.weights import INT4_CENTRE, QuantizedWeight, quantize

TILE_MIN, TILE_MAX = 32, 512
"""Values of a weight's row that a program reads at a time."""

PROGRAM_VALUES = 4096
"""Values of a weight that a program reads at a time."""

PROGRAMS_MIN = 256
"""Programs that keep a large GPU busy; with fewer, each takes fewer rows of the weight."""


class RowTiles(NamedTuple):
    """A program's share of a weight: rows, values of a row at a time, and tiles that are loaded in parallel."""

    outputs: int
    tile: int
    stages: int


def row_tiles(outputs: int, inputs: int, *, parts: int = 1) -> RowTiles | None:
    """Return the tiles for a product of one row; None if they do not divide the weight.

    `parts` weights are read at a time, as gate and up.
    """
    tile = min(inputs & -inputs, TILE_MAX)
    fitting = [
        each for each in (16, 8, 4) if each * tile * parts <= PROGRAM_VALUES and outputs % each == 0
    ]
    if tile < TILE_MIN or not fitting:
        return None
    busy = [each for each in fitting if outputs // each >= PROGRAMS_MIN]
    return RowTiles((busy or fitting[-1:])[0], tile, 3 if tile == TILE_MAX else 4)


class RowProduct:
    """The product by the weight of a linear layer [out, in]; it takes one row faster than torch."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kernel: Any) -> None:
        """Take `multiply_row` or a stand-in for it."""
        self.weight, self._bias, self._kernel = weight, bias, kernel
        self._turned = weight.t()
        outputs, inputs = weight.shape
        self._tiles = row_tiles(outputs, inputs) if weight.is_contiguous() else None
        self._gated = row_tiles(outputs // 2, inputs, parts=2) if weight.is_contiguous() else None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply activations [rows, in]; return [rows, out]."""
        if len(rows) != 1 or self._tiles is None:
            if self._bias is None:  # with less host time than functional.linear
                return torch.mm(rows, self._turned)
            return torch.addmm(self._bias, rows, self._turned)
        return self._launch_kernel(rows, self._tiles, len(self.weight), None)

    def gated(self, rows: torch.Tensor, activation: str) -> torch.Tensor | None:
        """Multiply one row by a merged gate and up weight; return the gated values [1, out / 2].

        None if the rows must be multiplied and gated separately.
        """
        if len(rows) != 1 or self._gated is None or self._bias is not None:
            return None
        return self._launch_kernel(rows, self._gated, len(self.weight) // 2, activation)

    def _launch_kernel(
        self, rows: torch.Tensor, tiles: RowTiles, outputs: int, activation: str | None
    ) -> torch.Tensor:
        out = rows.new_empty(1, outputs)
        self._kernel[(outputs // tiles.outputs,)](
            rows,
            self.weight,
            self.weight if self._bias is None else self._bias,
            out,
            outputs,
            rows.shape[1],
            HAS_BIAS=self._bias is not None,
            ACTIVATION=activation,
            OUTPUTS=tiles.outputs,
            TILE=tiles.tile,
            STAGES=tiles.stages,
        )
        return out


def with_row_kernel(product: Any, kernel: Any) -> Any:
    """Return the product of a plain linear layer with the kernel for one row; any other product as it is."""
    if type(product) is not nn.Linear or product._forward_hooks:  # noqa: SLF001
        return product
    return RowProduct(product.weight, product.bias, kernel)


Grid = Sequence[int]

_ALIGNED = 15
_INT32_MAX = 2**31 - 1


class FastKernel:
    """A Triton kernel; `kernel[grid](...)` launches as Triton's own, with constants and options as keywords."""

    def __init__(self, kernel: Any) -> None:
        """Take a kernel as `triton.jit` returns it."""
        self._kernel = kernel
        self._compiled: dict[object, Callable[..., None]] = {}

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        """Return the launch with a grid of one to three dimensions."""
        return functools.partial(self._launch, grid)

    def _launch(self, grid: Grid, *arguments: Any, **constants: Any) -> None:
        key = (*[_kind(each) for each in arguments], *constants.values())
        known = self._compiled.get(key)
        if known is None:
            compiled = self._kernel[grid](*arguments, **constants)
            self._compiled[key] = _launch_of(self._kernel, compiled, len(arguments), constants)
        else:
            known(grid, arguments)


def _kind(value: Any) -> object:
    """Return what Triton specializes an argument on."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.get_device(), value.data_ptr() & _ALIGNED == 0
    if isinstance(value, int):
        return value == 1, value & _ALIGNED == 0, value > _INT32_MAX
    return type(value)


def _launch_of(
    kernel: Any, compiled: Any, count: int, constants: dict[str, Any]
) -> Callable[[Grid, Sequence[Any]], None]:
    """Return the direct launch of a compiled kernel, for `count` arguments before the constants."""
    if not hasattr(compiled, "packed_metadata"):  # an interpreted kernel
        return lambda grid, arguments: kernel[grid](*arguments, **constants)
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    rest = [constants[name] for name in kernel.arg_names[count:]]
    # As Triton does: torch.cuda.current_stream makes an object.
    stream_of: Any = torch._C._cuda_getCurrentRawStream  # noqa: SLF001

    def launch(grid: Grid, arguments: Sequence[Any]) -> None:
        first, second, third = (*grid, 1, 1)[:3]
        stream = stream_of(arguments[0].get_device())
        run(first, second, third, stream, function, metadata, None, None, None, *arguments, *rest)

    return launch


FEW_ROWS_MAX = 64
"""The largest M for multiplication by quantized values; above, dequantizing first costs less than it saves."""

QUANTIZED_TILE_MAX = 64
"""The largest tile of K."""

PARTS_MAX = 8
"""The largest number of splits of K (split-K), which keep all SMs busy if N is small."""

STAGES = 4
"""Tiles that are loaded in parallel (pipeline stages)."""

WIDENED_INPUTS = 1024
"""Values that a program dequantizes."""


class QuantizedKernels(NamedTuple):
    """The Triton kernels of quantized weights."""

    multiply_few: Any
    widen: Any


class DeviceProduct:
    """The product of activations and a quantized weight [out, in] on a device.

    Without Triton's kernels, each product dequantizes the weight by torch operations.

    Attributes:
        shape: Outputs and inputs.
        size_bytes: Bytes on the device.
    """

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        kernels: QuantizedKernels | None,
        *,
        processors: int,
        converts_fp8: bool = True,
    ) -> None:
        """Take a weight on the device, the kernels, and the device's number of SMs.

        `converts_fp8`: the device has an instruction for it, from compute capability 8.9 on.
        """
        self._kernels = kernels
        self._weight, self._bias, self._processors = weight, bias, processors
        self.shape, self.size_bytes = weight.shape, weight.nbytes
        offsets = weight.scales if weight.offsets is None else weight.offsets
        self._memory = (weight.values.view(torch.uint8), weight.scales, offsets)
        self._group = min(weight.group, weight.inputs)
        whole = weight.group >= weight.inputs
        self._tile = tile_of(weight.kind, 0 if whole else weight.group)
        kind = "fp8 bits" if weight.kind == "fp8" and not converts_fp8 else weight.kind
        self._constants = constants_of(kind, has_offsets=weight.offsets is not None)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply activations [..., in]; return [..., out] of the same type."""
        order, kernels = self._weight.order, self._kernels
        if kernels is None:
            return functional.linear(rows, self._weight.dequantized().to(rows.dtype), self._bias)
        rows = rows if order is None else rows.index_select(-1, order)
        flat = rows.reshape(-1, self.shape[1])
        if self._tile is None or len(flat) > FEW_ROWS_MAX:
            return functional.linear(rows, self._widened(kernels, rows.dtype), self._bias)
        summed = self._few(kernels, flat.contiguous(), self._tile)
        summed = summed if self._bias is None else summed + self._bias
        return summed.to(rows.dtype).view(*rows.shape[:-1], self.shape[0])

    def _few(self, kernels: QuantizedKernels, rows: torch.Tensor, tile: int) -> torch.Tensor:
        """Return the float32 product for small M, of activations [M, in]."""
        outputs, inputs = self.shape
        plan = plan_of(len(rows), outputs, -(-inputs // tile), self._processors)
        sums = rows.new_empty((plan.parts, len(rows), outputs), dtype=torch.float32)
        kernels.multiply_few[-(-outputs // plan.outputs), -(-len(rows) // plan.rows), plan.parts](
            rows,
            *self._memory,
            sums,
            len(rows),
            outputs,
            inputs,
            self._weight.values.shape[1],
            self._group,
            self._weight.scales.shape[1],
            plan.part_tiles,
            **self._constants,
            ROWS=plan.rows,
            OUTPUTS=plan.outputs,
            TILE=tile,
            num_stages=STAGES,
        )
        return sums[0] if plan.parts == 1 else sums.sum(0)

    def _widened(self, kernels: QuantizedKernels, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized weight, [out, in], with inputs in their stored order."""
        outputs, inputs = self.shape
        weight = torch.empty(self.shape, dtype=dtype, device=self._weight.values.device)
        kernels.widen[outputs, -(-inputs // WIDENED_INPUTS)](
            *self._memory,
            weight,
            inputs,
            self._weight.values.shape[1],
            self._group,
            self._weight.scales.shape[1],
            **self._constants,
            INPUTS=WIDENED_INPUTS,
            # The product with a scale is rounded before an offset is added, as on a CPU: no fused multiply-add.
            enable_fp_fusion=False,
        )
        return weight

    def rows_of(self, indices: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight, as for an embedding; indices int64 [n], returns [n, in]."""
        return self._weight.rows_of(indices)


def product_on(
    device: str,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    kernels: QuantizedKernels | None,
) -> DeviceProduct:
    """Return the product of a weight on a device; copies the weight there."""
    facts = torch.cuda.get_device_properties(device)
    return DeviceProduct(
        weight.to(device),
        bias,
        kernels,
        processors=facts.multi_processor_count,
        converts_fp8=(facts.major, facts.minor) >= (8, 9),
    )


def quantized_trial(kind: str, kernels: QuantizedKernels, dtype: torch.dtype, device: str) -> float:
    """Return the largest difference to products by a dequantized weight of a format, for few and for many rows."""
    seed = torch.Generator().manual_seed(0)
    plain, rows = (torch.randn(count, 96, generator=seed) for count in (40, FEW_ROWS_MAX + 1))
    if kind == "fp8":
        values = plain.to(torch.float8_e4m3fn).view(torch.uint8)
        weight = QuantizedWeight("fp8", values, torch.ones(40, 3), 32, 96, dtype)
    else:  # any codes are values of fp4
        made = quantize(plain, "int4" if kind == "fp4" else kind, group=32)
        weight = dataclasses.replace(made, kind=kind)
    given, product = (rows / 8).to(device, dtype), product_on(device, weight, None, kernels)
    wanted = given.float() @ weight.to(device).dequantized().T
    return max(
        float((product(given[:count]).float() - wanted[:count]).abs().max())
        for count in (3, len(given))
    )


class QuantizedLayer(nn.Module):
    """A linear layer with a quantized weight."""

    def __init__(self, linear: nn.Linear, product: DeviceProduct) -> None:
        """Replace a layer."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.product = product
        # For models that read its data type; computing with it is an error.
        self.weight = torch.empty(product.shape, dtype=linear.weight.dtype, device="meta")

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply activations [..., in]; return [..., out]."""
        return self.product(rows)


class ProductPlan(NamedTuple):
    """The grid of a product: M and N per program, splits of K, and tiles per split."""

    rows: int
    outputs: int
    parts: int
    part_tiles: int


def constants_of(kind: str, *, has_offsets: bool) -> dict[str, object]:
    """Return the compile-time constants of the kernels that depend on the weight alone."""
    return {
        "KIND": kind,
        "FOUR_BITS": kind in FOUR_BITS,
        "CENTRE": INT4_CENTRE,
        "HAS_OFFSETS": has_offsets,
    }


def tile_of(kind: str, group: int) -> int | None:
    """Return the tile of K, within one group; None if groups are too small.

    Tensor cores need at least 16 values, of 4 bits in each nibble. A `group` of 0 is all of K.
    """
    if not group:
        return QUANTIZED_TILE_MAX
    tile = min(group & -group, QUANTIZED_TILE_MAX)
    return tile if tile >= (32 if kind in FOUR_BITS else 16) else None


def plan_of(rows: int, outputs: int, tiles: int, processors: int) -> ProductPlan:
    """Return the grid of a product with small M, so that all SMs read.

    It does not depend on values, as required by captured steps.
    """
    per_rows = min(max(16, power_of_two(rows)), FEW_ROWS_MAX)
    blocks = -(-rows // per_rows)
    fitting = [each for each in (64, 32) if -(-outputs // each) * blocks >= 2 * processors]
    per_outputs = fitting[0] if fitting else 16
    programs = -(-outputs // per_outputs) * blocks
    wanted = min(PARTS_MAX, tiles, -(-4 * processors // programs))
    part_tiles = -(-tiles // wanted)
    return ProductPlan(per_rows, per_outputs, -(-tiles // part_tiles), part_tiles)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not less than a number."""
    return 1 << (number - 1).bit_length()
