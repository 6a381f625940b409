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
from pathlib import Path
from typing import Any, NamedTuple

CAPABILITY = 90
SHARED_BYTES_MAX = 227 << 10
"""Maximum shared memory of a program on an H100."""

WARPS = 4
HEADS = {"3b": (16, 2, 128), "7b": (28, 4, 128), "64": (8, 2, 64), "80": (8, 2, 80), "96": (8, 2, 96),
         "256": (8, 2, 256), "512": (8, 1, 512)}  # fmt: skip
_MULTIPLES = ("inputs", "outputs", "bytes_of_one", "group", "width")
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
    signature = dict.fromkeys(("query", "keys", "values"), f"*{dtype}")
    signature |= dict.fromkeys(("tables", "contexts"), "*i32")
    signature |= dict.fromkeys(("summed_parts", "highest_parts", "total_parts"), "*fp32")
    signature |= {"scaling": "fp32", "window": "i32", "softcap": "fp32"}
    signature |= {"table_stride": "i32", "parts": "i32", "usual_parts": "i32"}
    label = f"decode {name} {dtype}" + " with rules" * ruled
    return _compile(decode_parts, label, signature, constants, STAGES)


def compile_merge(name: str) -> Compiled:
    """Compile the kernel that merges the maximum number of parts, for the heads of this name."""
    from vsched_workers.backends.cuda.attention import PARTS_MAX, STAGES, constants_of, merge_warps
    from vsched_workers.backends.cuda.triton_kernels import merge_parts

    heads, kv_heads, head_dim = HEADS[name]
    all_constants = constants_of(heads, kv_heads, head_dim, head_dim, 16, 2)
    names = ("VALUE_DIM", "VALUE_DIMS", "TOKENS")
    constants: dict[str, Any] = {each: all_constants[each] for each in names}
    constants |= {"PARTS": PARTS_MAX, "WINDOWED": False, "HAS_SINKS": False}
    signature = {"contexts": "*i32"}
    signature |= dict.fromkeys(("summed_parts", "highest_parts", "total_parts"), "*fp32")
    signature |= {"sinks": "*bf16", "out": "*bf16", "window": "i32"}
    signature |= {"heads": "i32", "parts": "i32", "usual_parts": "i32"}
    warps = merge_warps(PARTS_MAX, constants["VALUE_DIMS"])
    return _compile(merge_parts, f"merge {name}", signature, constants, STAGES, warps=warps)


def compile_layer(name: str) -> list[Compiled]:
    """Compile the kernels between the matrix products of a layer, for the heads of this name, in bfloat16."""
    from vsched_workers.backends.cuda import triton_kernels
    from vsched_workers.backends.cuda.fused_layers import GATE_VALUES
    from vsched_workers.backends.cuda.products import power_of_two

    heads, kv_heads, head_dim = HEADS[name]
    half, width = head_dim // 2, power_of_two(heads * head_dim)
    rows = dict.fromkeys(("hidden", "added", "weight", "normed"), "*bf16")
    rows |= {"width": "i32", "eps": "fp32"}
    names = ("qkv", "cos", "sin", "query_weight", "key_weight", "queries", "keys", "values")
    heads_of = dict.fromkeys(names, "*bf16") | {"slots": "*i64", "eps": "fp32"}
    shape = {"HEADS": heads, "KV_HEADS": kv_heads, "NORMS": True, "HALF": half}
    shape["DIMS"] = power_of_two(half)
    gates = {"gate_up": "*bf16", "gated": "*bf16", "width": "i32"}
    gate = {"ACTIVATION": "SILU", "WIDTH": GATE_VALUES}
    add = {"HAS_ADDED": True, "WIDTH": width}
    return [
        _compile(triton_kernels.add_norm, f"add and norm {width}", rows, add, 1),
        _compile(triton_kernels.rotate_and_store, f"rotate {name}", heads_of, shape, 1),
        _compile(triton_kernels.gate, "gate", gates, gate, 1),
    ]


def compile_row() -> list[Compiled]:
    """Compile the product of one bfloat16 row, plain and gated, in the blocks for a hidden size of 2048."""
    from vsched_workers.backends.cuda.products import row_tiles
    from vsched_workers.backends.cuda.triton_kernels import multiply_row

    signature = dict.fromkeys(("row", "weight", "bias", "out"), "*bf16")
    signature |= {"outputs": "i32", "inputs": "i32"}
    made = []
    for activation, parts in ((None, 1), ("SILU", 2)):
        tiles = row_tiles(11008, 2048, parts=parts)
        assert tiles is not None
        constants: dict[str, Any] = {"HAS_BIAS": activation is None, "ACTIVATION": activation}
        constants |= {"OUTPUTS": tiles.outputs, "TILE": tiles.tile, "STAGES": tiles.stages}
        name = f"multiply row {activation or 'with bias'}"
        made.append(_compile(multiply_row, name, signature, constants, 3))
    return made


def compile_vision(heads: int, head_dim: int, width: int) -> list[Compiled]:
    """Compile the kernels of a fused vision tower with these heads and rows of this width, in bfloat16."""
    from vsched_workers.backends.cuda import triton_kernels
    from vsched_workers.backends.cuda.products import power_of_two

    half, name = head_dim // 2, f"{heads} x {head_dim}"
    norm = dict.fromkeys(("hidden", "added", "weight", "bias", "normed"), "*bf16")
    norm |= {"width": "i32", "eps": "fp32"}
    rotated = {"qkv": "*bf16", "cos": "*fp32", "sin": "*fp32"}
    sizes = {"HEADS": heads, "HALF": half, "DIMS": power_of_two(half)}
    pairs = sizes | {"PAIRS": power_of_two(2 * heads)}
    add = {"HAS_ADDED": True, "WIDTH": power_of_two(width)}
    return [
        _compile(triton_kernels.add_layer_norm, f"add and layer norm {width}", norm, add, 1),
        _compile(triton_kernels.rotate_patches, f"rotate patches {name}", rotated, pairs, 1),
        compile_windows(heads, head_dim, "bf16"),
    ]


def compile_windows(heads: int, head_dim: int, dtype: str) -> Compiled:
    """Compile the attention of windows of a vision tower, of this type: bf16 or fp32."""
    from vsched_workers.backends.cuda.fused_tower import WINDOW_MAX, WINDOW_WARPS
    from vsched_workers.backends.cuda.products import power_of_two
    from vsched_workers.backends.cuda.triton_kernels import attend_windows

    half = head_dim // 2
    signature = dict.fromkeys(("qkv", "out"), f"*{dtype}")
    signature |= {"cos": "*fp32", "sin": "*fp32", "ends": "*i32", "scaling": "fp32"}
    constants = {"HEADS": heads, "HALF": half, "DIMS": power_of_two(half), "ROWS": WINDOW_MAX}
    name = f"attend windows {heads} x {head_dim} {dtype}"
    warps = WINDOW_WARPS[2 if dtype == "bf16" else 4]
    return _compile(attend_windows, name, signature, constants, 1, warps=warps)


def compile_multiply(kind: str, group: int, rows: int) -> Compiled:
    """Compile the product of few bfloat16 rows by a weight of this kind with zero points, in its largest block."""
    from vsched_workers.backends.cuda.products import STAGES, constants_of, tile_of
    from vsched_workers.backends.cuda.triton_kernels import multiply_few

    constants: dict[str, Any] = constants_of(kind, has_offsets=True)
    constants |= {"ROWS": rows, "OUTPUTS": 64, "TILE": tile_of(kind, group)}
    signature = {"rows": "*bf16", "values": "*u8", "scales": "*fp16", "offsets": "*fp16"}
    sizes = ("count", "outputs", "inputs", "bytes_of_one", "group", "groups", "part_tiles")
    signature |= {"sums": "*fp32", **dict.fromkeys(sizes, "i32")}
    name, capability = f"multiply {kind} {rows} rows", 80 if kind == "fp8 bits" else CAPABILITY
    return _compile(multiply_few, name, signature, constants, STAGES, capability=capability)


def compile_widen(kind: str) -> Compiled:
    """Compile the dequantization of a weight of this kind to bfloat16."""
    from vsched_workers.backends.cuda.products import WIDENED_INPUTS, constants_of
    from vsched_workers.backends.cuda.triton_kernels import widen

    constants: dict[str, Any] = constants_of(kind, has_offsets=True) | {"INPUTS": WIDENED_INPUTS}
    signature = {"values": "*u8", "scales": "*fp16", "offsets": "*fp16", "weight": "*bf16"}
    signature |= dict.fromkeys(("inputs", "bytes_of_one", "group", "groups"), "i32")
    return _compile(widen, f"widen {kind}", signature, constants, 1)


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
    signature: dict[str, str],
    constants: dict[str, Any],
    stages: int,
    *,
    warps: int = WARPS,
    capability: int = CAPABILITY,
) -> Compiled:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from triton.compiler import ASTSource  # type: ignore[import-not-found,import-untyped,unused-ignore]

    whole = signature | dict.fromkeys(constants, "constexpr")
    # As at launch: torch's allocations are aligned to 16 bytes.
    # Arguments that are multiples of 16 are specialized as well.
    places = [
        at
        for at, each in enumerate(kernel.arg_names)
        if whole[each].startswith("*") or each in _MULTIPLES
    ]
    aligned = {(at,): [["tt.divisibility", 16]] for at in places}
    ordered = {each: whole[each] for each in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=ordered, constexprs=constants, attrs=aligned)
    options = {"num_stages": stages, "num_warps": warps}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        target = f"--gpu-name=sm_{capability}" + "a" * (capability >= CAPABILITY)
        command = [str(assembler), "-v", target, file.name, "-o", "/dev/null"]
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
    for kind, group in (("int8", 128), ("int4", 32), ("int4", 128), ("fp8", 128),
                        ("fp8 bits", 128)):  # fmt: skip
        for rows in (16, 64):
            _tell(compile_multiply(kind, group, rows))
        _tell(compile_widen(kind))


def _tell(made: Compiled) -> None:
    print(f"| {made.name} | {made.registers} | {made.shared_bytes} | {made.spilled_bytes} |")


if __name__ == "__main__":
    main()
