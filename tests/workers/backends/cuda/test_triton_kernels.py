"""The Triton kernels: on a GPU or in Triton's interpreter, and compiled for a GPU that need not exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.gpu.kernels import SHARED_BYTES_MAX, compiled
from tests.workers.backends.cuda.on_host import DEVICE
from tests.workers.backends.paged import filled_cache, written_out
from vsched_workers.backends.cuda.attention import ContextSplit, TritonDecode, split_of_contexts
from vsched_workers.batching.paged_attention import ScoreRule, decode_by_rule

pytest.importorskip("triton")
# Warnings of torch and Triton on a new machine are not a failure of the tested code.
pytestmark = pytest.mark.filterwarnings("default")
HEAD_DIMS = (16, 64, 80, 96, 128, 256)


def differs(
    contexts: list[int],
    shape: tuple[int, int, int],
    *,
    block_size: int = 16,
    processors: int = 132,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Return the difference of the kernels to attention that is written out in double precision.

    A shape is the heads, the KV heads and the size of a head.
    """
    heads, kv_heads, head_dim = shape
    _, step = filled_cache(
        dtype, kv_heads, head_dim, contexts=contexts, block_size=block_size, device=DEVICE
    )
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(len(contexts), heads, head_dim, generator=generator).to(dtype)
    found = TritonDecode(processors)(query.to(DEVICE), 1, step, 0.3)
    assert found.dtype == dtype
    return float((found.cpu().double() - written_out(query, step, 1, ScoreRule(0.3))).abs().max())


@pytest.mark.parametrize("processors", [1, 4, 40], ids=["long parts", "parts", "short parts"])
@pytest.mark.parametrize(
    "shape", [(6, 2, 80), (7, 1, 16), (3, 3, 64), (6, 2, 96), (7, 1, 128), (3, 3, 256)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_equals_attention_written_out(
    processors: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Contexts with fewer tiles than parts, and with more; grouped heads of every size."""
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter computes with numpy, which has no bfloat16")
    found = differs([1, 5, 64, 200], shape, processors=processors, dtype=dtype)
    assert found < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.slow
def test_triton_spreads_one_long_context_among_many_short_ones() -> None:
    """128 rows, which keep all processors busy by themselves: the long context is still read in parts."""
    contexts = [1 + row % 5 for row in range(128)]
    contexts[77] = 4096
    assert differs(contexts, (2, 1, 16), processors=4) < 1e-5
    split = split_of_contexts(128, 4, tokens=4096)
    assert split == ContextSplit(parts=4, usual_parts=1)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    contexts=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=st.sampled_from(HEAD_DIMS),
    block_size=st.sampled_from([1, 16, 32, 48, 256]),
    processors=st.integers(1, 200),
)
def test_triton_equals_attention_written_out_for_random_shapes(
    contexts: list[int], kv_heads: int, group: int, head_dim: int, block_size: int, processors: int
) -> None:
    shape = (kv_heads * group, kv_heads, head_dim)
    assert differs(contexts, shape, block_size=block_size, processors=processors) < 1e-5


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    contexts=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    shape=st.sampled_from([(2, 64, 64), (1, 24, 16), (3, 192, 128)]),
    group=st.integers(1, 4),
    window=st.none() | st.integers(1, 320),
    softcap=st.none() | st.floats(1, 50),
    has_sinks=st.booleans(),
    processors=st.integers(1, 200),
)
def test_triton_attends_by_score_rules_as_torch_does(
    contexts: list[int],
    shape: tuple[int, int, int],
    group: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,  # from hypothesis
    processors: int,
) -> None:
    """Windows, soft-capping, sinks, and values of another size than keys, in any combination."""
    kv_heads, key_dim, value_dim = shape
    chance = torch.Generator().manual_seed(len(contexts))
    cache, step = filled_cache(
        torch.float32,
        kv_heads,
        key_dim,
        contexts=contexts,
        block_size=16,
        device=DEVICE,
        value_dim=value_dim,
    )
    heads = kv_heads * group
    query = torch.randn(len(contexts), heads, key_dim, generator=chance).to(DEVICE)
    sinks = torch.randn(heads, generator=chance).to(DEVICE) if has_sinks else None
    rule = ScoreRule(0.3, window, softcap, sinks)
    index = step.context_index(window, query.device)
    wanted = decode_by_rule(query, cache.layers[0], index, rule)
    found = TritonDecode(processors).by_rule(query, 0, step, rule)
    # A GPU computes tanh by the sigmoid to 2e-7, which soft-capping multiplies by the cap.
    within = 1e-5 + 1e-6 * (softcap or 0)
    torch.testing.assert_close(found, wanted, atol=within, rtol=1e-5)


def test_triton_reads_no_part_that_a_context_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their programs end at once, and leave their results uninitialized: here, NaNs."""
    empty = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        made = empty(self, *arguments, **options)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    assert differs([1, 64, 65, 300], (4, 2, 16)) < 1e-5


HALF = SHARED_BYTES_MAX // 2
ATTENTION = "compile_decode('3b', 'bf16'), compile_decode('80', 'fp32'), compile_merge('7b')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "registers_max", "shared_bytes_max"),
    [
        (ATTENTION, 168, HALF),
        ("compile_decode('512', 'fp32'), compile_merge('512')", 192, HALF),
        ("compile_multiply('int8', 128, 16), compile_multiply('int4', 32, 16)", 168, None),
        ("compile_multiply('fp8', 128, 64), compile_widen('int4')", 168, None),
        ("compile_multiply('fp8 bits', 128, 64)", 168, None),
        ("*compile_layer('3b'), *compile_layer('80'), *compile_row()", 128, None),
        ("*compile_vision(16, 80, 1280), *compile_vision(16, 72, 1152)", 192, None),
    ],
)
def test_kernels_compile_for_an_h100_and_spill_nothing(
    kernels: str, registers_max: int, shared_bytes_max: int | None
) -> None:
    """By Triton's compiler and assembler; in a separate process, which does not interpret.

    Three programs of 128 threads with 168 registers fit on an SM. Towers have more since Triton 3.7.
    """
    for name, registers, shared_bytes, spilled_bytes in compiled(f"[{kernels}]"):
        assert registers <= registers_max, name
        assert shared_bytes_max is None or shared_bytes <= shared_bytes_max, name
        assert spilled_bytes == 0, name


@pytest.mark.slow
def test_products_of_int8_weights_compile_for_prefetched_values() -> None:
    """Four tiles are in shared memory."""
    (made,) = compiled("[compile_multiply('int8', 128, 16)]")
    assert made[2] >= 4 * 64 * 64


@pytest.mark.slow
def test_windows_of_float32_towers_compile_for_registers() -> None:
    """Without tensor cores; with four warps, a thread spilled 70 KB, and compilation took minutes."""
    (made,) = compiled("[compile_windows(16, 80, 'fp32')]")
    assert made[3] < 8 << 10
    assert made[2] <= SHARED_BYTES_MAX
