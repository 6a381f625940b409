"""The quantization scheme in `quantization_config` of a checkpoint, and whether it is supported; read without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from vsched.errors import CheckpointError

FORMATS = ("int8", "int4")
"""Formats for quantization on loading."""

FOUR_BITS = ("int4", "fp4")
"""Formats with two values per byte."""

INTEGERS = ("int8", *FOUR_BITS)
"""Formats of integers times a scale; fp4 counts in halves."""

GROUPS = {"int8": 128, "int4": 32}
"""Default group sizes; a row with fewer inputs is one group."""

_VALUE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}
"""Bytes of a value by its type in a file; 2 for others."""

SUPPORTED = (
    "compressed-tensors (pack-quantized and int-quantized of 4 or 8 bits, float-quantized, mxfp4- and "
    "nvfp4-pack-quantized), fp8 and modelopt of FP8, mxfp4, gptq, awq and auto-round of 4 bits, gptq of 8"
)
_FP8 = ("F8_E4M3", "F8_E5M2")
_GROUP_MULTIPLE = 16
_LAYOUTS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
_GROUPED = ("bits", "group_size")
_DECISIVE = ("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric")
"""Settings of weights in compressed-tensors in which groups of layers must not differ."""
_TENSORS = {
    "compressed-tensors": ("weight_packed", "weight_scale"),
    "fp8": ("weight_scale_inv", "weight_scale"),
    "gptq": ("qweight",),
    "awq": ("qweight",),
    "mxfp4": ("weight_blocks",),
    "gguf": ("weight_values",),
}
"""The tensors by which a quantized layer is recognized."""
_QUANTIZED = tuple(f".{end}" for ends in _TENSORS.values() for end in ends)
_NO_VALUES = (
    "_scale",
    "_scale_inv",
    "scales",
    "_offsets",
    "_zero_point",
    "qzeros",
    "g_idx",
    "_shape",
)
"""Ends of the names of tensors that belong to quantized values, such as scales."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """The quantization of a checkpoint's linear layers.

    Attributes:
        method: `compressed-tensors`, `fp8`, `mxfp4`, `gptq` or `awq`; `gguf` for the layers of a converted GGUF file.
        kind: `int8`, `int4`, `fp4` or `fp8`; for `gguf` that of most layers.
        group: Group size; 0 for one scale per row or weight.
        symmetric: Whether there are no zero points.
        packed: Whether values are packed in int32.
        plain_zeros: Whether zero points of GPTQ are stored as they are, not minus one.
        block: Outputs and inputs that share a scale; None for scales per row.
    """

    method: str
    kind: str
    group: int
    symmetric: bool = True
    packed: bool = True
    plain_zeros: bool = False
    block: tuple[int, int] | None = None

    @property
    def bits(self) -> int:
        """Bits per value."""
        return 4 if self.kind in FOUR_BITS else 8

    @property
    def kinds(self) -> Sequence[str]:
        """Formats that layers may have."""
        return FORMATS if self.method == "gguf" else (self.kind,)

    def parameters(self, name: str, count: int, dtype: str) -> int:
        """Number of parameters in a tensor with `count` values of a type of the file."""
        if name.endswith(_NO_VALUES):
            return 0
        packed = {"I32": 32 // self.bits, "U8": 2}
        return count * packed.get(dtype, 1)

    def loaded_bytes(self, name: str, shape: Sequence[int], dtype: str, *, vision: bool) -> int:
        """Bytes of a tensor of the file in memory; of `gguf`, other matrices of the language model become int8."""
        size = _VALUE_BYTES.get(dtype, 2)
        if self.kind == "fp4" and name.endswith(_NO_VALUES):
            size = {"U8": 2, "F8_E4M3": 4}.get(dtype, size)  # scales, as float16 or float32
        if self.block is not None and dtype in _FP8:
            return prod(shape) + 4 * prod(shape) // self.block[1]  # each output gets its scales
        becomes_int8 = self.method == "gguf" and len(shape) == 2 and not vision
        return prod(shape) * (1 if becomes_int8 and dtype in {"BF16", "F16"} else size)

    def weight_name(self, tensor: str) -> str | None:
        """Name of the weight that a tensor is the first part of, as if it were not quantized; None for other tensors.

        Tensors of a layer's weight end in `.weight_scale` or `.qweight`, of stacked experts in `gate_up_proj_scale`.
        """
        for end in self.known_by:
            if tensor.endswith(f".{end}"):
                return f"{tensor.removesuffix(end)}weight"
            if tensor.endswith(stacked := end.removeprefix("weight")) and stacked != end:
                return tensor.removesuffix(stacked)
        return None

    @staticmethod
    def tensor_name(weight: str, end: str) -> str:
        """Name of a tensor of a weight with this name: the reverse of `weight_name`."""
        if weight.endswith(".weight"):
            return weight.removesuffix("weight") + end
        return weight + end.removeprefix("weight")

    @property
    def known_by(self) -> Sequence[str]:
        """Suffixes of tensor names; a quantized layer has one of them."""
        return _TENSORS[self.method]


def stated(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization settings of a `config.json`; None if there are none."""
    text = config.get("text_config")
    tables = (config, text if isinstance(text, Mapping) else {})
    found = (table.get("quantization_config") for table in tables)
    return next((each for each in found if isinstance(each, Mapping) and each), None)


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of a checkpoint from its `config.json`; None if it is not quantized.

    Raises:
        CheckpointError: When the scheme is not supported; the message names it.
    """
    given = stated(config)
    if given is None:
        return None
    try:
        return _scheme_of(given)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"config.json: quantization_config holds a value of the wrong type ({error}). "
            "Remedy: download the checkpoint again."
        ) from error


def _scheme_of(given: Mapping[str, Any]) -> Scheme:
    method = str(given.get("quant_method", "")).replace("_", "-")
    if method == "compressed-tensors":
        return _compressed(given)
    if method in {"fp8", "modelopt"}:
        return _fp8(given, method)
    if method in {"gptq", "awq", "auto-round"}:
        return _gptq_or_awq(given, method)
    if method == "mxfp4":
        return Scheme("mxfp4", "fp4", 32)
    if method == "gguf":
        return Scheme("gguf", "int4", 0)
    raise _refused(f"quant_method {method!r}")


def check_scales(dtypes: Mapping[str, str], scheme: Scheme | None) -> None:
    """Check that each quantized tensor has a scheme and a scale, from the types of all tensors.

    Raises:
        CheckpointError: When one has not: its values without scales are other weights.
    """
    for name, dtype in dtypes.items():
        if scheme is None and (dtype in _FP8 or name.endswith(_QUANTIZED)):
            raise CheckpointError(
                f"tensor {name} is quantized, and config.json has no quantization_config. Remedy: use the config.json "
                "that belongs to these weights, or serve a checkpoint without quantization."
            )
        holds_values = dtype in _FP8 or (dtype == "I8" and name.endswith(".weight"))
        if not holds_values or name.endswith(_NO_VALUES):
            continue
        if not any(f"{name}_{end}" in dtypes for end in ("scale", "scale_inv")):
            raise CheckpointError(
                f"tensor {name} of type {dtype} has no scale in the weight files. "
                "Remedy: download the checkpoint again."
            )


def _fp8(given: Mapping[str, Any], method: str) -> Scheme:
    if method == "modelopt" and given.get("quant_algo") != "FP8":
        raise _refused(f"modelopt with quant_algo {given.get('quant_algo')!r}")
    block = given.get("weight_block_size")
    if block is None:
        return Scheme("fp8", "fp8", 0)
    if not isinstance(block, list) or len(block) != 2:
        raise _refused(f"fp8 with weight_block_size {block!r}")
    return Scheme("fp8", "fp8", _group(block[1]), block=(int(block[0]), int(block[1])))


def _gptq_or_awq(given: Mapping[str, Any], method: str) -> Scheme:
    if method == "auto-round":
        packing = str(given.get("packing_format"))
        method = packing.removeprefix("auto_round:").removeprefix("auto_")
        if method not in {"gptq", "awq"}:
            raise _refused(f"auto-round with packing_format {packing!r}")
    bits = given.get("bits", given.get("w_bit"))
    if bits not in ({4, 8} if method == "gptq" else {4}):
        raise _refused(f"{method} of {bits} bits")
    layout = given.get("checkpoint_format") or (method == "awq" and given.get("version"))
    layout = str(layout or _LAYOUTS[method][0]).lower()
    if layout not in _LAYOUTS[method]:
        raise _refused(f"{method} in the layout {layout!r}")
    _check_same_groups(given)
    group = given.get("group_size", given.get("q_group_size", 128))
    return Scheme(
        method,
        f"int{int(bits)}",
        0 if group == -1 else _group(group),
        symmetric=False,
        plain_zeros=layout == "gptq_v2",
    )


def _check_same_groups(given: Mapping[str, Any]) -> None:
    """Check that settings of single layers only exclude them (`dynamic` of GPTQModel, `extra_config` of AutoRound)."""
    for key in ("dynamic", "extra_config"):
        for layers, said in (given.get(key) or {}).items():
            changes = said if isinstance(said, Mapping) else {}
            excluded = layers.startswith("-:") or (changes.get("bits") or 0) >= 16
            same = all(changes.get(each, given.get(each)) == given.get(each) for each in _GROUPED)
            if not (excluded or same):
                raise _refused(f"other bits or groups for the layers {layers!r} ({key})")


def _compressed(given: Mapping[str, Any]) -> Scheme:
    groups = given.get("config_groups")
    tables = list(groups.values()) if isinstance(groups, Mapping) else []
    weights = [table.get("weights") or {} for table in tables]
    kinds = [
        [table.get("format"), *map(each.get, _DECISIVE)]
        for table, each in zip(tables, weights, strict=True)
    ]
    if not kinds or any(each != kinds[0] for each in kinds):
        raise _refused("compressed-tensors with layers in several formats (config_groups), or none")
    said: Mapping[str, Any] = weights[0]
    form = tables[0].get("format") or given.get("format")
    bits, kind = said.get("num_bits"), said.get("type")
    strategy = said.get("strategy")
    symmetric = bool(said.get("symmetric", True))
    sparsity = (given.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense" or given.get("transform_config"):
        raise _refused("compressed-tensors with sparsity or transforms")
    fp4 = kind == "float" and bits == 4 and symmetric and not said.get("actorder")
    if fp4 and form in {"mxfp4-pack-quantized", "nvfp4-pack-quantized"}:
        return Scheme("compressed-tensors", "fp4", _group(said.get("group_size")))
    if strategy not in {"channel", "group", "tensor", "block"}:
        raise _refused(f"compressed-tensors with the strategy {strategy!r}")
    group = _group(said.get("group_size")) if strategy == "group" else 0
    if kind == "float" and bits == 8 and form in {"float-quantized", "naive-quantized"}:
        block = said.get("block_structure")
        if strategy == "block" and isinstance(block, list) and len(block) == 2:
            sizes = int(block[0]), int(block[1])
            return Scheme("compressed-tensors", "fp8", _group(block[1]), block=sizes)
        if strategy in {"channel", "tensor"}:
            return Scheme("compressed-tensors", "fp8", 0)
    if kind == "int" and form == "pack-quantized" and bits in {4, 8} and strategy != "tensor":
        return Scheme("compressed-tensors", f"int{int(bits)}", group, symmetric=symmetric)
    plain = form == "int-quantized" and strategy in {"channel", "group"}
    if kind == "int" and plain and bits == 8 and symmetric:
        return Scheme("compressed-tensors", "int8", group, packed=False)
    raise _refused(
        f"compressed-tensors of format {form!r}, {bits} bits of type {kind!r}, strategy {strategy!r}"
        f"{'' if symmetric else ', not symmetric'}"
    )


def _group(size: Any) -> int:
    if not isinstance(size, int) or size < _GROUP_MULTIPLE or size % _GROUP_MULTIPLE:
        raise _refused(f"groups of {size} inputs, no multiple of {_GROUP_MULTIPLE}")
    return size


def _refused(what: str) -> CheckpointError:
    return CheckpointError(
        f"config.json: quantization_config asks for {what}, which is not supported. Supported: {SUPPORTED}. "
        "Remedy: serve the checkpoint without quantization, with generate.weights."
    )
