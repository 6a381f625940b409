"""Matrix products with quantized weights on a GPU: int8, int4 and FP8 with group scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from vsched_workers.backends.cuda.attention import power_of_two
from vsched_workers.backends.cuda.launching import FastKernel
from vsched_workers.quantized.weights import INT4_CENTRE, QuantizedWeight

FEW_ROWS_MAX = 64
"""The largest M for multiplication by quantized values; above, dequantizing first costs less than it saves."""

TILE_MAX = 64
"""The largest tile of K."""

PARTS_MAX = 8
"""The largest number of splits of K (split-K), which keep all SMs busy if N is small."""

STAGES = 4
"""Tiles that are loaded in parallel (pipeline stages)."""

WIDENED_INPUTS = 1024
"""Values that a program dequantizes."""


Kernels = tuple[Any, Any]
"""The kernel for small M, and the dequantization kernel."""


def load_kernels() -> Kernels:
    """Return the Triton kernels."""
    from vsched_workers.backends.cuda.triton_products import multiply_few, widen

    return FastKernel(multiply_few), FastKernel(widen)


class TritonProduct:
    """The product of activations and a quantized weight [out, in] on a device.

    Attributes:
        shape: Outputs and inputs.
        size_bytes: Bytes on the device.
    """

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        *,
        processors: int,
        kernels: Kernels | None = None,
    ) -> None:
        """Take a weight on the device, the device's number of SMs, and kernels in place of Triton's, if any."""
        self._multiply, self._widen = kernels or load_kernels()
        self._weight, self._bias, self._processors = weight, bias, processors
        self.shape, self.size_bytes = weight.shape, weight.nbytes
        offsets = weight.scales if weight.offsets is None else weight.offsets
        self._memory = (weight.values.view(torch.uint8), weight.scales, offsets)
        self._group = min(weight.group, weight.inputs)
        whole = weight.group >= weight.inputs
        self._tile = tile_of(weight.kind, 0 if whole else weight.group)
        self._constants = constants_of(weight.kind, has_offsets=weight.offsets is not None)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply activations [..., in]; return [..., out] of the same type."""
        order = self._weight.order
        rows = rows if order is None else rows.index_select(-1, order)
        flat = rows.reshape(-1, self.shape[1])
        if self._tile is None or len(flat) > FEW_ROWS_MAX:
            return functional.linear(rows, self.widened(rows.dtype), self._bias)
        summed = self._few(flat.contiguous(), self._tile)
        summed = summed if self._bias is None else summed + self._bias
        return summed.to(rows.dtype).view(*rows.shape[:-1], self.shape[0])

    def _few(self, rows: torch.Tensor, tile: int) -> torch.Tensor:
        """Return the float32 product for small M, of activations [M, in]."""
        outputs, inputs = self.shape
        plan = plan_of(len(rows), outputs, -(-inputs // tile), self._processors)
        sums = rows.new_empty((plan.parts, len(rows), outputs), dtype=torch.float32)
        self._multiply[-(-outputs // plan.outputs), -(-len(rows) // plan.rows), plan.parts](
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

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantized weight, [out, in], with inputs in their stored order."""
        outputs, inputs = self.shape
        weight = torch.empty(self.shape, dtype=dtype, device=self._weight.values.device)
        self._widen[outputs, -(-inputs // WIDENED_INPUTS)](
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


class QuantizedLayer(nn.Module):
    """A linear layer with a quantized weight."""

    def __init__(self, linear: nn.Linear, product: TritonProduct) -> None:
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
    return {"KIND": kind, "CENTRE": INT4_CENTRE, "HAS_OFFSETS": has_offsets}


def tile_of(kind: str, group: int) -> int | None:
    """Return the tile of K, within one group; None if groups are too small.

    Tensor cores need at least 16 values, for int4 in each nibble. A `group` of 0 is all of K.
    """
    if not group:
        return TILE_MAX
    tile = min(group & -group, TILE_MAX)
    return tile if tile >= (32 if kind == "int4" else 16) else None


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
