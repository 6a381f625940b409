"""Repacking of quantized linear layers and experts from GGUF blocks, without rounding values of at most 4 bits.

Formats of at most 4 bits keep their numbers; scales and offsets are rounded to float16. The others become int8 with a
scale for each 32 inputs, with at most a quarter of their own rounding error. `gguf` dequantizes blocks: the weights for
the lowest and the highest number give a group's offset and scale,

    weight = low + scale * number,   scale = (high - low) / levels

Inputs of even and odd index are in bytes of even and odd index in all these formats, so a copy of the blocks with bytes
0 and 255 in turns has both.

Transformers permutes and merges rows: llama.cpp stores queries and keys in another order, gate and up projections of
experts separately. Matching rows by content recovers their order; a weight with an unmatched row becomes int8.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vsched.worker.spec import usable_cores
from vsched_workers.checkpoint.gguf_weights import FilePart, FileWeight
from vsched_workers.quantized.experts import mixtures, parameters_of
from vsched_workers.quantized.layers import READ_DIRECTLY, stack_outputs
from vsched_workers.quantized.published import written_blocks
from vsched_workers.quantized.weights import (
    INT4_CENTRE,
    QuantizedWeight,
    packed_int4,
    quantize,
)

_INT8_GROUP = 32
_VALUES_AT_ONCE = 1 << 28
"""Maximum values of the weights that are converted at once; a larger weight is converted alone."""


@dataclass(frozen=True, slots=True)
class _Format:
    """A format with numbers of at most 4 bits.

    Attributes:
        numbers: The bytes of a block that hold the numbers.
        levels: The largest number.
        group: Inputs that share a scale.
        has_offsets: Whether groups have offsets; without, the middle number stands for weight 0.
    """

    numbers: slice
    levels: int
    group: int
    has_offsets: bool


_FORMATS = {
    "Q4_0": _Format(slice(2, 18), 15, 32, has_offsets=False),
    "Q4_1": _Format(slice(4, 20), 15, 32, has_offsets=True),
    "Q4_K": _Format(slice(16, 144), 15, 32, has_offsets=True),
    "Q3_K": _Format(slice(0, 96), 7, 16, has_offsets=False),
    "Q2_K": _Format(slice(16, 80), 3, 16, has_offsets=True),
}


def packed_weights(model: nn.Module, weights: Iterable[FileWeight]) -> set[str]:
    """Return the names of the weights that stay quantized: linear layers without the head, and whole experts."""
    whole: Any = model
    head = whole.get_output_embeddings()
    given = {each.name for each in weights if each.is_quantized}
    linears = {
        f"{name}.weight"
        for name, each in model.named_modules()
        if type(each) is nn.Linear and each is not head
        if name.rpartition(".")[2] not in READ_DIRECTLY
    }
    experts = [{f"{name}.{end}" for end in parameters_of(each)} for name, each in mixtures(model)]
    return (linears & given).union(*(names for names in experts if names <= given))


def converted_weights(
    weights: Iterable[FileWeight], packed: Collection[str]
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each weight in a checkpoint; those in `packed` stay quantized."""
    waiting: deque[tuple[int, Future[dict[str, torch.Tensor]]]] = deque()
    with _threads() as pool:
        for weight in weights:
            count = weight.target.numel()
            while waiting and count + sum(each for each, _ in waiting) > _VALUES_AT_ONCE:
                yield waiting.popleft()[1].result()
            waiting.append((count, pool.submit(_convert, weight, quantized=weight.name in packed)))
        for _, made in waiting:
            yield made.result()


@contextlib.contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Return a pool with a thread per usable core; torch's own threads, which would compete, are off."""
    given, pool = torch.get_num_threads(), ThreadPoolExecutor(usable_cores())
    torch.set_num_threads(1)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an interruption waits for none
        torch.set_num_threads(given)


def _convert(weight: FileWeight, *, quantized: bool) -> dict[str, torch.Tensor]:
    if quantized:
        parts = written_blocks(weight.name, quantized_weight(weight))
        return {name: each.view(*weight.target.shape[:-1], -1) for name, each in parts.items()}
    made = torch.empty(weight.target.shape, dtype=weight.target.dtype)
    rest = made.view(-1)
    for part in weight.parts():
        values = part.values.reshape(-1)
        rest[: len(values)] = values
        rest = rest[len(values) :]
    return {weight.name: made}


def quantized_weight(weight: FileWeight) -> QuantizedWeight:
    """Return the quantized form of a weight; experts are below each other."""
    kinds = [each.tensor_type for each in weight.tensors]
    made = stack_outputs([_quantized_part(part, kinds) for part in weight.parts()])
    assert made is not None, "int4 and int8 have int8 in common"
    return replace(made.in_half(), dtype=weight.target.dtype)


def _quantized_part(part: FilePart, kinds: Sequence[Any]) -> QuantizedWeight:
    """Return the quantized form of a part; int8 if its rows differ from the rows of its tensors."""
    rows = part.values.reshape(-1, part.values.shape[-1])
    order = _order(torch.cat([*part.plain]), rows)
    if order is not None:
        sources = zip(part.blocks, part.plain, kinds, strict=True)
        found = stack_outputs([_read(*source) for source in sources])
        if found is not None:
            return found.at_rows(order)
    return _int8(rows)


def _int8(rows: torch.Tensor) -> QuantizedWeight:
    return quantize(rows, "int8", group=_INT8_GROUP)


def _read(blocks: Any, plain: torch.Tensor, kind: Any) -> QuantizedWeight:
    """Return the quantized form of some rows of a tensor, from their blocks and their values."""
    from gguf import GGML_QUANT_SIZES, dequantize

    form = _FORMATS.get(kind.name)
    if form is None:
        return _int8(plain)
    blocks = blocks.reshape(len(plain), -1, GGML_QUANT_SIZES[kind][1]).copy()
    blocks[..., form.numbers][..., ::2], blocks[..., form.numbers][..., 1::2] = 0, 255
    ends = torch.from_numpy(dequantize(blocks.reshape(len(plain), -1), kind))
    low, high = ends[:, :: form.group], ends[:, 1 :: form.group]
    return _int4(plain, low, high, form)


def _order(plain: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor | None:
    """Return the index of each of the wanted rows in others; None if one is missing."""
    if plain.shape != wanted.shape:
        return None
    if torch.equal(plain, wanted):
        return torch.arange(len(plain))
    places = {row.tobytes(): index for index, row in enumerate(plain.numpy())}
    order = [places.get(row.tobytes()) for row in wanted.numpy()]
    return None if None in order else torch.tensor(order)


def _int4(
    plain: torch.Tensor, low: torch.Tensor, high: torch.Tensor, form: _Format
) -> QuantizedWeight:
    """Return a weight [out, in] as int4, from the lowest and highest weight of each group, [out, groups]."""
    scales = (high - low) / form.levels
    steps = torch.where(scales == 0, 1.0, scales)[..., None]
    numbers = (plain.view(*scales.shape, -1) - low[..., None]).div_(steps).round_()
    middle = (form.levels + 1) // 2
    values = numbers.clamp_(0, form.levels).to(torch.uint8).flatten(1) + (INT4_CENTRE - middle)
    offsets = low + middle * scales if form.has_offsets else None
    return QuantizedWeight(
        kind="int4",
        values=packed_int4(values),
        scales=scales,
        group=form.group,
        inputs=plain.shape[1],
        dtype=plain.dtype,
        offsets=offsets,
    )
