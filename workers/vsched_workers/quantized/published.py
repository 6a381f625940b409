"""Reading of published quantized checkpoints into the representation in memory.

The format of a checkpoint's values is described in `quantization_config` of its `config.json`. Values, scales and zero
points are rearranged without rounding: the weight is bit-identical to that dequantized in float32 by the format's own
library.

- *compressed-tensors*: `weight_packed` [out, in / n] of int32, n values of 4 or 8 bits each, the lowest bits first; or
  `weight` of int8 or FP8; `weight_scale` [out, groups]; optionally `weight_g_idx` [in], the group of each input.
- *fp8*: `weight` of FP8 and `weight_scale_inv`, one for each block of outputs and inputs.
- *gptq*: `qweight` [in / n, out], `qzeros` [groups, out / n], `scales` [groups, out]; zero points are one more than
  stored, except in `gptq_v2`; optionally `g_idx` [in], the group of each input.
- *awq*: `qweight` [in, out / 8], with outputs in each int32 in the order 0, 2, 4, 6, 1, 3, 5, 7; `qzeros` likewise.
- *mxfp4*: `weight_blocks` [out, groups, 16], two values of 4 bits (e2m1) in each byte; `weight_scales` [out, groups],
  exponents of 2. In *compressed-tensors* they are `weight_packed` [out, in / 2] and `weight_scale`; of NVFP4, scales
  are FP8, divided by `weight_global_scale`.
- *gguf*, of converted GGUF files: values, scales and offsets of `QuantizedWeight`, in the format of each layer.

Inputs of a group that are not adjacent (`desc_act`, `actorder`) are made adjacent, in their original order. Activations
are not quantized, even if a checkpoint asks for it: that only reduces rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vsched.errors import CheckpointError
from vsched_workers.quantized.schemes import Scheme
from vsched_workers.quantized.weights import (
    INT4_CENTRE,
    QuantizedWeight,
    exact_scales,
    packed_int4,
)

Read = Callable[[str], torch.Tensor | None]
"""Reads a tensor of a layer by the end of its name; returns None if there is none."""

Reads = Callable[..., torch.Tensor]
"""Reads the first tensor that a layer has, by several ends of its name.

Raises:
    CheckpointError: When it has none.
"""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position of each of eight adjacent outputs in its int32, in nibbles."""
_ORDERS = {"gptq": "g_idx", "compressed-tensors": "weight_g_idx"}
"""The tensor with the group of each input."""


def read_quantized(
    scheme: Scheme, read: Read, shape: tuple[int, int], dtype: torch.dtype, *, name: str
) -> QuantizedWeight:
    """Read the weight [out, in] of a layer with this name.

    Raises:
        CheckpointError: When a tensor does not match the scheme; the message names it and the layer.
    """
    try:
        return _read_layer(scheme, read, shape, dtype)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error


def _read_layer(
    scheme: Scheme, read: Read, shape: tuple[int, int], dtype: torch.dtype
) -> QuantizedWeight:
    def reads(*ends: str) -> torch.Tensor:
        found = next((each for each in map(read, ends) if each is not None), None)
        if found is None:
            raise _wrong(ends[0], "nothing", "it")
        return found

    inputs = shape[1]
    if scheme.method == "gguf":
        return _read_blocks(read, reads, shape, dtype)
    order = _order_of(scheme, read, inputs)
    reader = _READERS.get(scheme.kind) or _READERS[scheme.method]
    given = reader(scheme, reads, shape)
    scales, offsets = exact_scales(given["scales"], given.get("offsets"))
    values = given["values"] if order is None else given["values"][:, order]
    groups = scales.shape[1]
    group = inputs if groups == 1 else scheme.group
    fits = group > 0 and -(-inputs // group) == groups
    _require(fits, "scales", f"{groups} groups", f"groups of {group or inputs} inputs")
    _require(len(scales) == shape[0], "scales", f"{len(scales)} outputs", shape[0])
    return QuantizedWeight(
        kind=scheme.kind,
        values=packed_int4(values) if scheme.kind == "int4" else values,
        scales=scales,
        group=group,
        inputs=inputs,
        dtype=dtype,
        offsets=offsets,
        order=order,
    )


def written_blocks(name: str, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """Return the tensors of a `gguf` checkpoint for a quantized weight with this name."""
    parts = {"values": weight.values, "scales": weight.scales, "offsets": weight.offsets}
    return {f"{name}_{part}": each for part, each in parts.items() if each is not None}


def _read_blocks(
    read: Read, reads: Reads, shape: tuple[int, int], dtype: torch.dtype
) -> QuantizedWeight:
    """Read the tensors of `written_blocks`."""
    values, scales, inputs = reads("weight_values"), reads("weight_scales"), shape[1]
    kind = "int4" if values.dtype == torch.uint8 else "int8"
    _of_shape(values, "weight_values", (shape[0], inputs // 2 if kind == "int4" else inputs))
    _require(inputs % scales.shape[1] == 0, "weight_scales", [*scales.shape], "equal groups")
    group, offsets = inputs // scales.shape[1], read("weight_offsets")
    return QuantizedWeight(kind, values, scales, group, inputs, dtype, offsets)


def _order_of(scheme: Scheme, read: Read, inputs: int) -> torch.Tensor | None:
    """Return the order of inputs, int32 [in], that makes each group's inputs adjacent; None if they are."""
    name = _ORDERS.get(scheme.method)
    given = None if name is None else read(name)
    if name is None or given is None:
        return None
    _require(given.shape == (inputs,), name, [*given.shape], [inputs])
    groups = given.long()
    wanted = torch.arange(inputs) // (scheme.group or inputs)
    if torch.equal(groups, wanted):
        return None
    order = groups.argsort(stable=True)
    sizes = f"{scheme.group} inputs of each group"
    _require(torch.equal(groups[order], wanted), name, "groups of other sizes", sizes)
    return order.to(torch.int32)


def _compressed(scheme: Scheme, read: Reads, shape: tuple[int, int]) -> dict[str, Any]:
    if not scheme.packed:
        values = _of_shape(read("weight"), "weight", shape)
        return {"values": values, "scales": _by_output(read("weight_scale"), shape[0])}
    count = 32 // scheme.bits
    packed = _of_shape(read("weight_packed"), "weight_packed", (shape[0], -(-shape[1] // count)))
    values = _unpacked(packed, scheme.bits)[:, : shape[1]]
    scales = _by_output(read("weight_scale"), shape[0])
    if scheme.symmetric:
        return _centred(scheme.bits, values, scales, None)
    zeros = read("weight_zero_point")
    if zeros.dtype == torch.int32:
        zeros = _unpacked(zeros.T, scheme.bits).T[: shape[0]]
    else:
        zeros = zeros.to(torch.int32) + (1 << scheme.bits - 1)
    return _centred(scheme.bits, values, scales, zeros.reshape(scales.shape))


def _fp8(scheme: Scheme, read: Reads, shape: tuple[int, int]) -> dict[str, Any]:
    values = _of_shape(read("weight"), "weight", shape)
    scales = read("weight_scale_inv", "weight_scale").float()
    if values.dtype != torch.float8_e4m3fn:
        raise _wrong("weight", str(values.dtype), "float8_e4m3fn")
    # Scales of blocks, of rows, or of the whole weight, as [out, groups].
    if scheme.block is None:
        _require(scales.numel() in {1, shape[0]}, "scales", [*scales.shape], [shape[0], 1])
        scales = scales.reshape(-1, 1).expand(shape[0], 1)
    else:
        rows, columns = (-(-size // side) for size, side in zip(shape, scheme.block, strict=True))
        _of_shape(scales, "scales", (rows, columns))
        scales = scales.repeat_interleave(scheme.block[0], 0)[: shape[0]]
    return {"values": values.view(torch.uint8), "scales": scales.contiguous()}


def _fp4(scheme: Scheme, read: Reads, shape: tuple[int, int]) -> dict[str, Any]:
    name = scheme.known_by[0]
    packed = _of_shape(read(name).flatten(1), name, (shape[0], shape[1] // 2))
    scales = read("weight_scales" if scheme.method == "mxfp4" else "weight_scale")
    # Values are counted in halves.
    if scales.dtype == torch.uint8:
        return {"values": packed, "scales": torch.exp2(scales.float() - 128)}
    return {"values": packed, "scales": scales.float() / (2 * read("weight_global_scale").float())}


def _gptq(scheme: Scheme, read: Reads, shape: tuple[int, int]) -> dict[str, Any]:
    count = 32 // scheme.bits
    packed = _of_shape(read("qweight"), "qweight", (-(-shape[1] // count), shape[0]))
    values = _unpacked(packed.T, scheme.bits)[:, : shape[1]]
    scales = read("scales").float().T
    zeros = _unpacked(read("qzeros"), scheme.bits)[:, : shape[0]].T
    zeros = zeros if scheme.plain_zeros else zeros + 1
    return _centred(scheme.bits, values, scales, zeros)


def _awq(scheme: Scheme, read: Reads, shape: tuple[int, int]) -> dict[str, Any]:
    packed = _of_shape(read("qweight"), "qweight", (shape[1], shape[0] // 8))
    values, zeros = (_in_order(_unpacked(each, 4)).T for each in (packed, read("qzeros")))
    return _centred(4, values, read("scales").float().T, zeros)


_READERS = {"compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq, "fp8": _fp8, "fp4": _fp4}
"""Readers by kind, or else by method."""


def _in_order(values: torch.Tensor) -> torch.Tensor:
    return values.view(len(values), -1, 8)[:, :, list(_AWQ_ORDER)].flatten(1)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack values of `bits` bits in int32 [rows, n], the lowest bits first, to [rows, n * 32 / bits]."""
    if words.dtype != torch.int32:
        raise _wrong("packed values", str(words.dtype), "int32")
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets.to(torch.int32)
    return torch.stack((octets & 15, octets >> 4), -1).flatten(1).to(torch.int32)


def _centred(
    bits: int, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None
) -> dict[str, Any]:
    """Return unsigned values about a fixed zero point; other zero points become offsets."""
    centre = 1 << bits - 1
    offsets = None
    if zeros is not None:
        _require(zeros.shape == scales.shape, "zeros", [*zeros.shape], [*scales.shape])
        offsets = scales * (centre - zeros) if bool((zeros != centre).any()) else None
    assert centre in {INT4_CENTRE, 128}
    made = values.to(torch.uint8) if bits == 4 else (values - centre).to(torch.int8)
    return {
        "values": made.contiguous(),
        "scales": scales.contiguous(),
        "offsets": None if offsets is None else offsets.contiguous(),
    }


def _by_output(scales: torch.Tensor, outputs: int) -> torch.Tensor:
    _require(scales.numel() % outputs == 0, "scales", [*scales.shape], f"{outputs} outputs")
    return scales.float().reshape(outputs, -1)


def _of_shape(tensor: torch.Tensor, name: str, shape: tuple[int, int]) -> torch.Tensor:
    _require(tuple(tensor.shape) == shape, name, [*tensor.shape], [*shape])
    return tensor


def _require(fits: bool, name: str, found: object, wanted: object) -> None:
    if not fits:
        raise _wrong(name, f"{found}", f"{wanted}")


def _wrong(name: str, found: str, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"{name} of a quantized weight: found {found}, quantization_config and config.json ask for {wanted}. "
        "Remedy: use the config.json that belongs to these weights."
    )
