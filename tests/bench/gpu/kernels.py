"""Compiles the Triton kernels for an H100, which is not required: `python -m tests.bench.gpu.kernels`.

Shows the assembler's report for each type and head size: registers per thread, bytes of shared
memory per program, and bytes spilled from registers. In the loop over the context, spills would
cost more than the arithmetic. `TRITON_INTERPRET` must not be set, because the interpreter compiles
nothing.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

CAPABILITY = 90
SHARED_BYTES_MAX = 227 << 10
"""Maximum shared memory of a program on an H100."""

WARPS = 4
HEADS = {"3b": (16, 2, 128), "7b": (28, 4, 128), "64": (8, 2, 64), "80": (8, 2, 80), "96": (8, 2, 96),
         "256": (8, 2, 256), "512": (8, 1, 512)}  # fmt: skip
_MULTIPLES = ("inputs", "outputs", "bytes_of_one", "group", "width")
_FLOATS = ("scaling", "softcap", "eps")
_INTEGERS = ("window", "table_stride", "parts", "usual_parts", "heads", "count", "groups", "part_tiles",
             *_MULTIPLES)  # fmt: skip
_POINTERS = {"tables": "*i32", "contexts": "*i32", "ends": "*i32", "slots": "*i64"}
_POINTERS |= dict.fromkeys(("summed_parts", "highest_parts", "total_parts", "sums"), "*fp32")
_QUANTIZED = {"values": "*u8", "scales": "*fp16", "offsets": "*fp16"}
_ANGLES = {"cos": "*fp32", "sin": "*fp32"}
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


class Compiled(NamedTuple):
    """Compilation result of one kernel."""

    name: str
    registers: int
    shared_bytes: int
    spilled_bytes: int


def compile_decode(name: str, dtype: str, *, ruled: bool = False) -> Compiled:
    """Compile the decode kernel for the heads of this name, and values of this type: bf16 or fp32."""
    from vsched_workers.backends.cuda.attention import STAGES, constants_of
    from vsched_workers.backends.cuda.triton_kernels import decode_parts

    heads, kv_heads, head_dim = HEADS[name]
    size = 2 if dtype == "bf16" else 4
    constants: dict[str, Any] = constants_of(heads, kv_heads, head_dim, head_dim, 16, size)
    constants |= {"WINDOWED": ruled, "CAPPED": ruled}
    label = f"decode {name} {dtype}" + " with rules" * ruled
    return _compile(decode_parts, label, constants, STAGES, dtype=dtype)


def compile_merge(name: str) -> Compiled:
    """Compile the kernel that merges the maximum number of parts, for the heads of this name."""
    from vsched_workers.backends.cuda.attention import PARTS_MAX, STAGES, constants_of, merge_warps
    from vsched_workers.backends.cuda.triton_kernels import merge_parts

    heads, kv_heads, head_dim = HEADS[name]
    all_constants = constants_of(heads, kv_heads, head_dim, head_dim, 16, 2)
    names = ("VALUE_DIM", "VALUE_DIMS", "TOKENS")
    constants: dict[str, Any] = {each: all_constants[each] for each in names}
    constants |= {"PARTS": PARTS_MAX, "WINDOWED": False, "HAS_SINKS": False}
    warps = merge_warps(PARTS_MAX, constants["VALUE_DIMS"])
    return _compile(merge_parts, f"merge {name}", constants, STAGES, warps=warps)


def compile_layer(name: str) -> list[Compiled]:
    """Compile the kernels between the matrix products of a layer, for the heads of this name, in bfloat16."""
    from vsched_workers.backends.cuda import triton_kernels
    from vsched_workers.backends.cuda.fused_layers import GATE_VALUES
    from vsched_workers.backends.cuda.products import power_of_two

    heads, kv_heads, head_dim = HEADS[name]
    half, width = head_dim // 2, power_of_two(heads * head_dim)
    shape = {"HEADS": heads, "KV_HEADS": kv_heads, "NORMS": True, "HALF": half}
    shape["DIMS"] = power_of_two(half)
    gate = {"ACTIVATION": "SILU", "WIDTH": GATE_VALUES}
    add = {"HAS_ADDED": True, "WIDTH": width}
    return [
        _compile(triton_kernels.add_norm, f"add and norm {width}", add, 1),
        _compile(triton_kernels.rotate_and_store, f"rotate {name}", shape, 1),
        _compile(triton_kernels.gate, "gate", gate, 1),
    ]


def compile_row() -> list[Compiled]:
    """Compile the product of one bfloat16 row, plain and gated, in the blocks for a hidden size of 2048."""
    from vsched_workers.backends.cuda.products import row_tiles
    from vsched_workers.backends.cuda.triton_kernels import multiply_row

    made = []
    for activation, parts in ((None, 1), ("SILU", 2)):
        tiles = row_tiles(11008, 2048, parts=parts)
        assert tiles is not None
        constants: dict[str, Any] = {"HAS_BIAS": activation is None, "ACTIVATION": activation}
        constants |= {"OUTPUTS": tiles.outputs, "TILE": tiles.tile, "STAGES": tiles.stages}
        name = f"multiply row {activation or 'with bias'}"
        made.append(_compile(multiply_row, name, constants, 3))
    return made


def compile_vision(heads: int, head_dim: int, width: int) -> list[Compiled]:
    """Compile the kernels of a fused vision tower with these heads and rows of this width, in bfloat16."""
    from vsched_workers.backends.cuda import triton_kernels
    from vsched_workers.backends.cuda.products import power_of_two

    half, name = head_dim // 2, f"rotate patches {heads} x {head_dim}"
    pairs = {"HEADS": heads, "HALF": half, "DIMS": power_of_two(half)}
    pairs["PAIRS"] = power_of_two(2 * heads)
    add = {"HAS_ADDED": True, "WIDTH": power_of_two(width)}
    return [
        _compile(triton_kernels.add_layer_norm, f"add and layer norm {width}", add, 1),
        _compile(triton_kernels.rotate_patches, name, pairs, 1, _ANGLES),
        compile_windows(heads, head_dim, "bf16"),
    ]


def compile_windows(heads: int, head_dim: int, dtype: str) -> Compiled:
    """Compile the attention of windows of a vision tower, of this type: bf16 or fp32."""
    from vsched_workers.backends.cuda.fused_tower import WINDOW_MAX, WINDOW_WARPS
    from vsched_workers.backends.cuda.products import power_of_two
    from vsched_workers.backends.cuda.triton_kernels import attend_windows

    half = head_dim // 2
    constants = {"HEADS": heads, "HALF": half, "DIMS": power_of_two(half), "ROWS": WINDOW_MAX}
    name = f"attend windows {heads} x {head_dim} {dtype}"
    warps = WINDOW_WARPS[2 if dtype == "bf16" else 4]
    return _compile(attend_windows, name, constants, 1, _ANGLES, dtype=dtype, warps=warps)


def compile_multiply(kind: str, group: int, rows: int) -> Compiled:
    """Compile the product of few bfloat16 rows by a weight of this kind with zero points, in its largest block."""
    from vsched_workers.backends.cuda.products import STAGES, constants_of, tile_of
    from vsched_workers.backends.cuda.triton_kernels import multiply_few

    constants: dict[str, Any] = constants_of(kind, has_offsets=True)
    constants |= {"ROWS": rows, "OUTPUTS": 64, "TILE": tile_of(kind, group)}
    name, capability = f"multiply {kind} {rows} rows", 80 if kind == "fp8 bits" else CAPABILITY
    return _compile(multiply_few, name, constants, STAGES, _QUANTIZED, capability=capability)


def compile_widen(kind: str) -> Compiled:
    """Compile the dequantization of a weight of this kind to bfloat16."""
    from vsched_workers.backends.cuda.products import WIDENED_INPUTS, constants_of
    from vsched_workers.backends.cuda.triton_kernels import widen

    constants: dict[str, Any] = constants_of(kind, has_offsets=True) | {"INPUTS": WIDENED_INPUTS}
    return _compile(widen, f"widen {kind}", constants, 1, _QUANTIZED)


def compiled(made: str) -> list[Compiled]:
    """Evaluate a list of calls of this module in a separate process without the interpreter."""
    code = f"import json; from tests.bench.gpu.kernels import *; print(json.dumps({made}))"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert not ran.returncode, ran.stderr
    return [Compiled(*each) for each in json.loads(ran.stdout)]


def _compile(
    kernel: Any,
    name: str,
    constants: dict[str, Any],
    stages: int,
    types: Mapping[str, str] = MappingProxyType({}),
    *,
    dtype: str = "bf16",
    warps: int = WARPS,
    capability: int = CAPABILITY,
) -> Compiled:
    """Compile a kernel; `types` has the types of the pointers that have another type and are not in `_POINTERS`."""
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from triton.backends.nvidia.compiler import get_ptxas  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from triton.compiler import ASTSource  # type: ignore[import-not-found,import-untyped,unused-ignore]

    known = _POINTERS | dict.fromkeys(_INTEGERS, "i32") | dict.fromkeys(_FLOATS, "fp32")
    known |= {**types, **dict.fromkeys(constants, "constexpr")}
    signature = {each: known.get(each, f"*{dtype}") for each in kernel.arg_names}
    # As at launch: torch's allocations are aligned to 16 bytes.
    # Arguments that are multiples of 16 are specialized as well.
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, (each, kind) in enumerate(signature.items())
        if kind.startswith("*") or each in _MULTIPLES
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_stages": stages, "num_warps": warps}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assembler = get_ptxas(capability).path
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        target = f"--gpu-name=sm_{capability}" + "a" * (capability >= CAPABILITY)
        command = [assembler, "-v", target, file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spills = _REGISTERS.search(said), _SPILLS.search(said)
    assert registers is not None, said
    assert spills is not None, said
    spilled = int(spills[1]) + int(spills[2])
    return Compiled(name, int(registers[1]), int(made.metadata.shared), spilled)


def main() -> None:
    print("| kernel | registers | shared bytes | spilled bytes |\n|---|---|---|---|")
    for name in HEADS:
        for made in (
            compile_decode(name, "bf16"),
            compile_decode(name, "fp32"),
            compile_decode(name, "bf16", ruled=True),
            compile_merge(name),
            *compile_layer(name),
        ):
            _tell(made)
    for made in compile_row():
        _tell(made)
    for heads, head_dim, width in ((16, 80, 1280), (16, 72, 1152)):
        windows = compile_windows(heads, head_dim, "fp32")
        for made in (*compile_vision(heads, head_dim, width), windows):
            _tell(made)
    for kind, group in (("int8", 128), ("int4", 32), ("int4", 128), ("fp4", 32), ("fp8", 128),
                        ("fp8 bits", 128)):  # fmt: skip
        for rows in (16, 64):
            _tell(compile_multiply(kind, group, rows))
        _tell(compile_widen(kind))


def _tell(made: Compiled) -> None:
    print(f"| {made.name} | {made.registers} | {made.shared_bytes} | {made.spilled_bytes} |")


if __name__ == "__main__":
    main()
