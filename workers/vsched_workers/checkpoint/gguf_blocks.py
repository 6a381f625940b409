"""Repacking of quantized linear layers from GGUF blocks, without rounding values of at most 4 bits.

Formats of at most 4 bits keep their numbers; scales and offsets are rounded to float16. The others become int8 with a
scale for each 32 inputs, with at most a quarter of their own rounding error. `gguf` dequantizes blocks: the weights for
the lowest and the highest number give a group's offset and scale,

    weight = low + scale * number,   scale = (high - low) / levels

Inputs of even and odd index are in bytes of even and odd index in all these formats, so a copy of the blocks with bytes
0 and 255 in turns has both.

Transformers maps names and permutes rows (llama.cpp stores queries and keys in another order). Matching rows by content
recovers the permutation; a weight with an unmatched row stays dequantized.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vsched.worker.spec import usable_cores
from vsched_workers.quantized.weights import (
    HALF_MIN,
    INT4_CENTRE,
    QuantizedWeight,
    packed_int4,
    quantize,
)

_UNQUANTIZED = ("F32", "F16", "BF16")
_INT8_GROUP = 32


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


def quantized_layers(
    model: nn.Module, tensors: Mapping[str, Any], report: Callable[[float], None]
) -> dict[str, QuantizedWeight]:
    """Return quantized weights of linear layers by name, without the head; the model's own copies are freed.

    `tensors` are tensors of a `gguf.GGUFReader` by the model's weight names.
    """
    whole: Any = model
    head = whole.get_output_embeddings()
    linears = {
        f"{name}.weight": each.weight
        for name, each in model.named_modules()
        if type(each) is nn.Linear and each is not head
    }
    names = [
        name
        for name, tensor in tensors.items()
        if name in linears and tensor.tensor_type.name not in _UNQUANTIZED
    ]
    found = {}
    with _threads() as pool:
        made = pool.map(lambda name: _read(tensors[name], linears[name]), names)
        for count, (name, weight) in enumerate(zip(names, made, strict=True), 1):
            report(count / len(names))
            if weight is not None:
                found[name], linears[name].data = weight, torch.empty(0)
    return found


@contextlib.contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Return a pool with a thread per usable core; torch's own threads, which would compete, are off."""
    given, pool = torch.get_num_threads(), ThreadPoolExecutor(usable_cores())
    torch.set_num_threads(1)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(given)


def _read(tensor: Any, weight: torch.Tensor) -> QuantizedWeight | None:
    """Return the quantized form of a weight from its tensor; None if rows do not match."""
    from gguf import GGML_QUANT_SIZES, dequantize

    plain = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
    order = _order(plain.to(weight.dtype), weight)
    if order is None:
        return None
    plain, form = plain[order], _FORMATS.get(tensor.tensor_type.name)
    if form is None:
        return replace(quantize(plain, "int8", group=_INT8_GROUP), dtype=weight.dtype)
    block_bytes = GGML_QUANT_SIZES[tensor.tensor_type][1]
    blocks = tensor.data[order.numpy()].reshape(len(plain), -1, block_bytes)
    blocks[..., form.numbers][..., ::2], blocks[..., form.numbers][..., 1::2] = 0, 255
    ends = torch.from_numpy(dequantize(blocks.reshape(len(plain), -1), tensor.tensor_type))
    low, high = ends[:, :: form.group], ends[:, 1 :: form.group]
    return _int4(plain, low, high, form, weight.dtype)


def _order(plain: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """Return the index of each of the weight's rows in a plain weight; None if one is missing."""
    if plain.shape != weight.shape:
        return None
    given, wanted = (each.detach().contiguous().view(torch.uint8) for each in (plain, weight))
    if torch.equal(given, wanted):
        return torch.arange(len(plain))
    places = {row.tobytes(): index for index, row in enumerate(given.numpy())}
    order = [places.get(row.tobytes()) for row in wanted.numpy()]
    return None if None in order else torch.tensor(order)


def _int4(
    plain: torch.Tensor, low: torch.Tensor, high: torch.Tensor, form: _Format, dtype: torch.dtype
) -> QuantizedWeight:
    """Return a weight [out, in] as int4, from the lowest and highest weight of each group, [out, groups]."""
    scales = (high - low) / form.levels
    steps = torch.where(scales == 0, 1.0, scales)[..., None]
    numbers = (plain.view(*scales.shape, -1) - low[..., None]).div_(steps).round_()
    middle = (form.levels + 1) // 2
    values = numbers.clamp_(0, form.levels).to(torch.uint8).flatten(1) + (INT4_CENTRE - middle)
    offsets = low + middle * scales if form.has_offsets else None
    sizes = scales[scales != 0].abs()
    if bool((sizes >= HALF_MIN).all()):
        scales, offsets = scales.half(), None if offsets is None else offsets.half()
    return QuantizedWeight(
        kind="int4",
        values=packed_int4(values),
        scales=scales,
        group=form.group,
        inputs=plain.shape[1],
        dtype=dtype,
        offsets=offsets,
    )
