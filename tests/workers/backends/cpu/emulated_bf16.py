"""Emulation of VDPBF16PS, to test its kernels on processors without it.

    pytest -p tests.workers.backends.cpu.emulated_bf16 tests/workers/backends/cpu tests/workers/adapters/test_fused.py

Set `NUMBA_CACHE_DIR` to an empty folder: the names of stored kernels do not contain the emulation. Sums have the order
of the instruction, but products are rounded before they are added.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir  # type: ignore[import-untyped]

from vsched_workers.backends.cpu.kernels import simd

_WORDS, _FLOATS = simd.WORDS, simd.FLOATS
_HALVES = ir.VectorType(ir.IntType(16), simd.LANES)
_TRUNCATION = """
define float @__truncsfbf2(float %value) {
  %bits = bitcast float %value to i32
  %shifted = lshr i32 %bits, 16
  %odd = and i32 %shifted, 1
  %half = add i32 %odd, 32767
  %rounded = add i32 %bits, %half
  %kept = lshr i32 %rounded, 16
  %quiet = or i32 %shifted, 64
  %is_nan = fcmp uno float %value, %value
  %found = select i1 %is_nan, i32 %quiet, i32 %kept
  %result = bitcast i32 %found to float
  ret float %result
}
"""
"""Rounding to bfloat16, which LLVM calls by this name; the result is in the lower half of the register."""


def _splat(value: int) -> Any:
    return simd.splat(_WORDS, value)


def _dot(self: simd.InstructionWriter, total: Any, first: Any, second: Any) -> Any:
    build = self.builder
    (low, high), (other_low, other_high) = (_pairs(build, each) for each in (first, second))
    total = build.fadd(total, build.fmul(high, other_high))
    return build.fadd(total, build.fmul(low, other_low))


def _pairs(build: Any, values: Any) -> tuple[Any, Any]:
    """Return the first and the second values of bfloat16 pairs as float32 vectors."""
    words = build.bitcast(values, _WORDS)
    low = build.shl(words, _splat(16))
    high = build.and_(words, _splat(0xFFFF0000))
    return build.bitcast(low, _FLOATS), build.bitcast(high, _FLOATS)


def _narrow_both(self: simd.InstructionWriter, lower: Any, upper: Any) -> Any:
    build = self.builder

    def narrow(values: Any) -> Any:
        words = build.bitcast(values, _WORDS)
        odd = build.and_(build.lshr(words, _splat(16)), _splat(1))
        rounded = build.add(build.add(words, odd), _splat(0x7FFF))
        return build.trunc(build.lshr(rounded, _splat(16)), _HALVES)

    order = ir.Constant(ir.VectorType(simd.WORD, 2 * simd.LANES), list(range(2 * simd.LANES)))
    both = build.shuffle_vector(narrow(lower), narrow(upper), order)
    return build.bitcast(both, simd.BF16_PAIRS)


def _compile(text: str) -> Any:
    """Compile a module, and return its engine, which must stay alive."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(text), machine)
    engine.finalize_object()
    return engine


if not simd.has_bf16_dot():
    _engine = _compile(_TRUNCATION)
    binding.add_symbol("__truncsfbf2", _engine.get_function_address("__truncsfbf2"))
    changed: Any = simd
    changed.InstructionWriter.dot = _dot
    changed.InstructionWriter.narrow_both = _narrow_both
    changed.has_bf16_dot = lambda: True
