"""The representation of a quantized weight in memory, from loading or quantization until a backend packs it.

All formats are converted to one: a low-bit value, and for each group of inputs a scale and optionally an offset,

    weight[o, i] = scale[o, g] * (value[o, i] - centre) + offset[o, g],   g = i // group

If the inputs of a group are not adjacent, inputs are stored in the order of groups, and `order` is that order.
Quantization here is symmetric, without offsets. For int4, the scale of a group is the one of several candidates with
the least squared error. Scales are float16 if that is exact, and values are rounded with the scale as stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from vsched.errors import CheckpointError
from vsched_workers.parallel.slicing import Cut
from vsched_workers.quantized.schemes import FOUR_BITS, GROUPS

INT4_CENTRE = 8
FP4_NUMBERS = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]).to(torch.int8)
"""The e2m1 values of all codes, in halves: so they are integers, and scales are half of a checkpoint's."""
_INT4_SHRINKS = (1.0, 0.925, 0.85)
"""Candidate scales, relative to the one that represents the largest value; smaller ones clip it."""
_TRIED_VALUES_MAX = 1 << 20
"""Values that are rounded at once: temporary tensors of more leave the cache, at less than half the speed."""

HALF_MIN = 2.0**-14
"""Smallest normal number of float16."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized weight [out, in].

    Attributes:
        kind: `int8`, `int4`, `fp4` (codes of `FP4_NUMBERS`) or `fp8` (e4m3).
        values: [out, in] of int8, or of FP8 as uint8; of 4 bits uint8 [out, in / 2], the first input in the low nibble.
        scales: [out, groups], float32 or float16.
        group: Group size; the last group may be smaller.
        inputs: Inputs of the weight.
        dtype: The type of the dequantized weight.
        offsets: As scales and of their type; None without offsets.
        order: The layer's input at each position, int32 [in]; None for the original order.
    """

    kind: str
    values: torch.Tensor
    scales: torch.Tensor
    group: int
    inputs: int
    dtype: torch.dtype
    offsets: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return len(self.values), self.inputs

    @property
    def nbytes(self) -> int:
        """Bytes of values, scales, offsets and the order of inputs."""
        return sum(each.nbytes for each in (*self._tensors(), self.order) if each is not None)

    def dequantized(self) -> torch.Tensor:
        """Return the weight as float32, [out, in], with inputs in the order of the layer."""
        weight = self._numbers().float() * self._spread(self.scales)
        weight = weight if self.offsets is None else weight + self._spread(self.offsets)
        return weight if self.order is None else weight[:, self.order.argsort()]

    def _spread(self, given: torch.Tensor) -> torch.Tensor:
        return given.float().repeat_interleave(self.group, 1)[:, : self.inputs]

    def _numbers(self) -> torch.Tensor:
        """Return the numbers that scales multiply, [out, in], in stored order, of int8 or FP8."""
        values = self.unpacked()
        if self.kind == "fp4":
            return FP4_NUMBERS.to(values.device)[values.int()]
        if self.kind == "int4":
            return values.to(torch.int8) - INT4_CENTRE
        return values.view(torch.float8_e4m3fn) if self.kind == "fp8" else values

    def unpacked(self) -> torch.Tensor:
        """Return the values, one byte each, [out, in], in stored order."""
        if self.kind not in FOUR_BITS:
            return self.values
        pairs = torch.stack((self.values & 15, self.values >> 4), -1)
        return pairs.flatten(1)[:, : self.inputs]

    def as_int8(self, group: int) -> QuantizedWeight:
        """Return the same weight of an integer format as int8, with a group size that divides its own."""
        each = self.group // group
        scales, *offsets = (
            given.repeat_interleave(each, 1)[:, : -(-self.inputs // group)]
            for given in self._tensors()[1:]
        )
        offset = offsets[0] if offsets else None
        values = self._numbers()
        return replace(self, kind="int8", values=values, scales=scales, group=group, offsets=offset)

    def part(self, cut: Cut) -> QuantizedWeight:
        """Return a rank's part.

        Raises:
            CheckpointError: When it would begin or end within a group, or have inputs of all groups.
        """
        if cut.dimension == 0:
            return self._with_each(cut.read)
        if self.order is not None:
            raise CheckpointError(
                f"a rank's share of the {self.inputs} inputs of a weight would have some of each group: its "
                "inputs are grouped in another order (desc_act). Remedy: set generate.tensor_parallel to 1."
            )
        group, whole = self.group, self.group >= self.inputs
        borders = [place for span in cut.spans for place in span if place != self.inputs]
        if any(place % 2 if whole else place % group for place in borders):
            raise CheckpointError(
                f"a rank's inputs of a weight would begin or end at {max(borders)}, within a group: {group} inputs "
                "have one scale. Remedy: set generate.tensor_parallel to 1 or to fewer ranks."
            )
        values = cut.read(self.unpacked())
        if not whole:
            groups = Cut(
                1,
                -(-cut.whole // group),
                tuple((start // group, -(-stop // group)) for start, stop in cut.spans),
            )
            scales = groups.read(self.scales)
            offsets = None if self.offsets is None else groups.read(self.offsets)
        else:
            scales, offsets, group = self.scales, self.offsets, max(cut.size, 1)
        packed = packed_int4(values) if self.kind in FOUR_BITS else values.contiguous()
        return replace(
            self, values=packed, scales=scales, offsets=offsets, inputs=cut.size, group=group
        )

    def owned(self) -> QuantizedWeight:
        """Return a copy in separate memory: values may lie in a mapped file."""
        return self._with_each(torch.clone)

    def to(self, device: str) -> QuantizedWeight:
        """Return it on a device."""
        order = None if self.order is None else self.order.to(device)
        moved = self._with_each(lambda each: each.to(device))
        return replace(moved, order=order)

    def rows_of(self, indices: torch.Tensor) -> torch.Tensor:
        """Return dequantized rows, as for an embedding; indices int64 [n], returns [n, in]."""
        return self.at_rows(indices).dequantized().to(self.dtype)

    def at_rows(self, indices: torch.Tensor) -> QuantizedWeight:
        """Return the weight of some outputs; indices int64 [n]."""
        return self._with_each(lambda each: each[indices])

    def in_half(self) -> QuantizedWeight:
        """Return it with scales and offsets rounded to float16, unless a scale is below its normal range."""
        sizes = self.scales[self.scales != 0].abs()
        if not bool((sizes >= HALF_MIN).all()):
            return self
        return self._replaced(self.values, *(each.half() for each in self._tensors()[1:]))

    def chunks(self, count: int) -> list[QuantizedWeight]:
        """Split it into equal parts by outputs, which are views."""
        parts = [each.chunk(count) for each in self._tensors()]
        return [self._replaced(*part) for part in zip(*parts, strict=True)]

    def _tensors(self) -> list[torch.Tensor]:
        given = self.values, self.scales, self.offsets
        return [each for each in given if each is not None]

    def _with_each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedWeight:
        """Return it with changed values, scales and offsets."""
        return self._replaced(*map(change, self._tensors()))

    def _replaced(
        self, values: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None = None
    ) -> QuantizedWeight:
        return replace(self, values=values, scales=scales, offsets=offsets)

    @property
    def form(self) -> tuple[object, ...]:
        """The properties that weights must share to be stacked."""
        order = None if self.order is None else self.order.numpy().tobytes()
        return (self.kind, self.group, self.inputs, order)


def merged_weights(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Stack weights of one format."""
    first = weights[0]
    assert len({each.form for each in weights}) == 1, "they are of several forms"
    types = {each.scales.dtype for each in weights}
    dtype = types.pop() if len(types) == 1 else torch.float32
    offsets = None
    if any(each.offsets is not None for each in weights):
        offsets = torch.cat(
            [torch.zeros_like(w.scales) if w.offsets is None else w.offsets for w in weights]
        ).to(dtype)
    return replace(
        first,
        values=torch.cat([each.values for each in weights]),
        scales=torch.cat([each.scales for each in weights]).to(dtype),
        offsets=offsets,
    )


RoundGroups = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Quantizes groups of float32 values, [out, groups, group], of an even size; returns values and scales as kept."""


def quantize(
    weight: torch.Tensor, kind: str, *, group: int = 0, int4: RoundGroups | None = None
) -> QuantizedWeight:
    """Quantize a weight [out, in] to one of `FORMATS`; `group` is the group size, 0 for the default.

    `int4` is a faster implementation for a device, with the same result. An output's values do not depend on other
    outputs, nor a group's on other groups.
    """
    outputs, inputs = weight.shape
    group = min(group or GROUPS[kind], inputs)
    rows = max(_TRIED_VALUES_MAX // inputs, 1)
    make = _int8 if kind == "int8" else _int4 if int4 is None or group % 2 else int4
    parts = [
        make(_grouped(weight[start : start + rows].float(), group))
        for start in range(0, outputs, rows)
    ]
    columns = inputs if kind == "int8" else -(-inputs // 2)
    return QuantizedWeight(
        kind=kind,
        values=torch.cat([each[0][:, :columns] for each in parts]),
        scales=torch.cat([each[1] for each in parts]),
        group=group,
        inputs=inputs,
        dtype=weight.dtype,
    )


def exact_scales(
    scales: torch.Tensor, offsets: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return scales and offsets as float16 if that is exact, otherwise as float32."""
    given = [each for each in (scales, offsets) if each is not None]
    if all(torch.equal(each.half().float(), each.float()) for each in given):
        return scales.half(), None if offsets is None else offsets.half()
    return scales.float(), None if offsets is None else offsets.float()


def packed_int4(values: torch.Tensor) -> torch.Tensor:
    """Pack values 0 to 15, [out, in], two per byte."""
    if values.shape[1] % 2:
        values = functional.pad(values, (0, 1))
    return values[:, 0::2] | (values[:, 1::2] << 4)


def _grouped(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Return a weight as [out, groups, group]; the last group is padded with zeros."""
    if missing := -weight.shape[1] % group:
        weight = functional.pad(weight, (0, missing))
    return weight.view(len(weight), -1, group)


def _int8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = _kept(groups.abs().amax(-1) / 127)
    values = (groups / _divisors(scales)).round().clamp(-127, 127)
    return values.to(torch.int8).flatten(1), scales


def _int4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    places = groups.abs().argmax(-1, keepdim=True)
    largest = groups.gather(-1, places).squeeze(-1)
    best: tuple[torch.Tensor, torch.Tensor] | None = None
    least = torch.empty(0)
    for scales in candidate_scales(largest):
        values = (groups / _divisors(scales)).round().clamp(-8, 7)
        error = (values * scales.float()[..., None] - groups).square().sum(-1)
        if best is None:
            best, least = (values, scales), error
            continue
        better = error < least
        best = (
            torch.where(better[..., None], values, best[0]),
            torch.where(better, scales, best[1]),
        )
        least = torch.where(better, error, least)
    assert best is not None
    return packed_int4((best[0] + INT4_CENTRE).to(torch.uint8).flatten(1)), best[1]


def candidate_scales(largest: torch.Tensor) -> torch.Tensor:
    """Return the candidate scales of groups by their values of the largest magnitude, [candidates, ...], float16.

    That value becomes -8, which has no positive counterpart; a smaller scale may reduce the errors of the others.
    """
    return torch.stack([_kept(largest / -INT4_CENTRE * shrink) for shrink in _INT4_SHRINKS])


def _kept(scales: torch.Tensor) -> torch.Tensor:
    """Return scales as float16, which is exact in float32; scales below float16's normal range are raised to it."""
    small = scales.abs() < HALF_MIN
    return torch.where(small, scales.sign() * HALF_MIN, scales).half()


def _divisors(scales: torch.Tensor) -> torch.Tensor:
    scales = scales.float()[..., None]
    return torch.where(scales == 0, 1.0, scales)
