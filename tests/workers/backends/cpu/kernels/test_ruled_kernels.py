"""Sliding windows and soft-capping in attention kernels, and activations, against torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

pytest.importorskip("numba")

from tests.workers.backends.cpu.kernels.operands import OPERANDS, Operand, bits, draw, use_operand
from tests.workers.backends.paged import chunk_of, filled_cache, prefill_in_double
from vsched_workers.backends.cpu import attention
from vsched_workers.backends.cpu.kernels import activation
from vsched_workers.backends.cpu.kernels.activation import gelu, gelu_tanh, swiglu
from vsched_workers.backends.cpu.kernels.decode_attention import decode
from vsched_workers.backends.cpu.kernels.rope import RopeRows, heads_of
from vsched_workers.backends.cpu.threads import pool_of
from vsched_workers.batching.paged_attention import ScoreRule, context_slots

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, SCALING = 6, 2, 64, 16, 0.125
RULES = [(1, None), (16, None), (37, None), (1000, None), (None, 3.0), (37, 3.0)]


def weights_of(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    bent = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    return bent.softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "softcap", "shape"),
    [
        *((window, softcap, (6, 2, 64, 16)) for window, softcap in RULES),
        (None, None, (1, 1, 64, 16)),
        (None, None, (6, 2, 128, 32)),
        (None, None, (7, 1, 80, 16)),
        (None, None, (4, 2, 32, 8)),
        (37, None, (9, 1, 96, 5)),
    ],
)
def test_decode_reads_the_blocks_of_its_window_alone(
    window: int | None, softcap: float | None, shape: tuple[int, int, int, int]
) -> None:
    """All other slots are NaN, as if they belonged to other sequences."""
    heads, kv_heads, head_dim, block = shape
    contexts = [1, block, block + 1, 36, 37, 38, 200]
    rows, width = len(contexts), -(-200 // block)
    shuffled = np.random.default_rng(1).permutation(rows * width)
    tables = shuffled.astype(np.int32).reshape(rows, width)
    keys, values = (
        torch.full((tables.size * block, kv_heads, head_dim), torch.nan).bfloat16() for _ in "kv"
    )
    starts = [max(0, length - (window or length)) for length in contexts]
    slots = [
        torch.from_numpy(context_slots(table, length, block))
        for table, length in zip(tables, contexts, strict=True)
    ]
    for each, start in zip(slots, starts, strict=True):
        kept = each[start // block * block : -1]
        keys[kept], values[kept] = (draw(len(kept), kv_heads, head_dim, seed=n) for n in (2, 3))
    qkv = draw(rows, heads + 2 * kv_heads, head_dim, seed=4)
    cos, sin = (make(rows, head_dim // 2).bfloat16() for make in (torch.ones, torch.zeros))
    out = torch.full((rows, heads, head_dim), torch.nan).bfloat16()
    decode(
        0,
        qkv.data_ptr(),
        out.data_ptr(),
        heads_of(heads, 0, 0, 0.0, SCALING, softcap=softcap, window=window),
        RopeRows(bits(cos), bits(sin), np.array([each[-1] for each in slots])),
        bits(keys),
        bits(values),
        tables,
        np.array(contexts, dtype=np.int32),
        block,
        1,
    )
    for row, (each, start) in enumerate(zip(slots, starts, strict=True)):
        seen, taken = (
            cached[each[start:]].double().repeat_interleave(heads // kv_heads, dim=1)
            for cached in (keys, values)
        )
        scores = torch.einsum("hd,lhd->hl", qkv[row, :heads].double(), seen) * SCALING
        wanted = torch.einsum("hl,lhd->hd", weights_of(scores, softcap), taken)
        torch.testing.assert_close(out[row].double(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize(
    ("window", "softcap", "first", "rows"),
    [
        (1, None, 0, 9),
        (16, None, 130, 70),
        (37, None, 36, 1),
        (1000, None, 4, 33),
        (None, 3.0, 4, 33),
        (37, 3.0, 130, 70),
    ],
)
def test_prefill_by_rule_is_that_of_torch(
    operand: Operand,
    window: int | None,
    softcap: float | None,
    first: int,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_operand(monkeypatch, operand)
    _, step = filled_cache(
        torch.bfloat16, KV_HEADS, HEAD_DIM, contexts=[first + rows], block_size=BLOCK_SIZE
    )
    segment, (query, *_) = chunk_of(step, 0, first, rows, heads=HEADS)
    rule = ScoreRule(SCALING, window, softcap)
    out = query.new_empty(query.transpose(0, 1).shape)
    attention.prefill_by_rule(query, 1, segment, step, rule, out)
    wanted = prefill_in_double(query, step, segment, rule)
    torch.testing.assert_close(out.double(), wanted, rtol=4e-2, atol=4e-2)


def test_loops_of_activations_have_names_of_their_own() -> None:
    """Stored code is linked by name: of two loops with one name, a process would call the first in both kernels."""
    loops = activation._silu_row, activation._gelu_row, activation._gelu_tanh_row
    assert len({loop.py_func.__qualname__ for loop in loops}) == 3
    assert all("<locals>" not in loop.py_func.__qualname__ for loop in loops)


@pytest.mark.parametrize(
    ("kernel", "function"),
    [
        (swiglu, functional.silu),
        (gelu, functional.gelu),
        (gelu_tanh, lambda rows: functional.gelu(rows, approximate="tanh")),
    ],
    ids=["silu", "gelu", "tanh"],
)
@pytest.mark.parametrize(
    ("threads", "rows"), [(0, 7), pytest.param(2, 3000, marks=pytest.mark.slow)]
)
def test_activations_equal_the_modules(
    kernel: Any, function: Callable[[torch.Tensor], torch.Tensor], threads: int, rows: int
) -> None:
    """Far from zero they are the identity, or zero; the exponential neither overflows nor yields NaN."""
    gate, up = draw(rows, 37) * 4, draw(rows, 37, seed=1)
    gate[0, :6] = torch.tensor([0.0, -0.0, 300.0, -300.0, 17.0, -17.0])
    wanted = function(gate.float()).bfloat16() * up
    pool = pool_of(threads) if threads else 0
    kernel(pool, gate.data_ptr(), up.data_ptr(), rows, 37)
    clear = wanted.abs() > 1e-3  # torch subtracts two nearly equal numbers
    assert (gate == wanted)[clear].float().mean() > 0.95
    torch.testing.assert_close(gate, wanted, rtol=0.01, atol=1e-6)
