"""Decode, prefill and patch attention on the CPU against reference implementations."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.backends.cpu.kernels.operands import (
    OPERANDS,
    Operand,
    bits,
    draw,
    needs_bf16_dot,
    needs_tiles,
    use_operand,
    with_operand,
)
from tests.workers.backends.paged import (
    chunk_of,
    dequantized,
    filled_cache,
    prefill_in_double,
    segment_of,
    written_out,
)
from vsched.worker.contract import WorkerSettings
from vsched_workers.backends.choice import choose_backend
from vsched_workers.backends.cpu import attention
from vsched_workers.backends.cpu.kernels.bf16 import BF16, FLOAT32
from vsched_workers.backends.cpu.kernels.decode_attention import decode
from vsched_workers.backends.cpu.kernels.prefill_attention import BLOCK
from vsched_workers.backends.cpu.kernels.rope import RopeRows, heads_of
from vsched_workers.backends.cpu.threads import pool_of, process_pool
from vsched_workers.backends.reference.attention import decode_by_gather, prefill_by_gather
from vsched_workers.batching.kv_cache import LayerKv
from vsched_workers.batching.paged_attention import (
    DecodeKernel,
    PagedStep,
    PatchKernel,
    PrefillKernel,
    ScoreRule,
    attend_by_rule,
    context_slots,
    decode_by_rule,
)
from vsched_workers.memory.sparse_runs import sparsely

BLOCK_SIZE = 4
CONTEXTS = [1, 4, 5, 37]

NO_CACHE: Any = None
"""The backend chooses its kernels independently of the cache."""


def choose_decode(
    settings: WorkerSettings, dtype: torch.dtype, kv_dtype: str = "auto"
) -> DecodeKernel:
    return choose_backend(settings, dtype, kv_dtype).choose_attention(NO_CACHE, 1).decode


def filled(dtype: torch.dtype, kv_heads: int, head_dim: int) -> PagedStep:
    return filled_cache(dtype, kv_heads, head_dim, contexts=CONTEXTS, block_size=BLOCK_SIZE)[1]


SINKS = torch.tensor([0.5, -9.0, 3.0, 20.0])


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 4e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        (ScoreRule(0.3), (4, 2, 16, 16, 2)),
        (ScoreRule(0.3), (3, 3, 8, 8, 1)),
        (ScoreRule(0.3), (7, 1, 128, 128, 1)),
        (ScoreRule(0.3), (4, 2, 64, 32, 2)),
        (ScoreRule(0.3, window=5), (4, 2, 32, 32, 2)),
        (ScoreRule(0.3, sinks=SINKS), (4, 2, 48, 32, 2)),
        (ScoreRule(0.3, window=18, softcap=2.0, sinks=SINKS), (4, 1, 64, 64, 1)),
    ],
)
def test_decode_equals_attention_written_out(
    kv_dtype: str,
    dtype: torch.dtype,
    within: float,
    rule: ScoreRule,
    shape: tuple[int, int, int, int, int],
) -> None:
    """Grouped heads, contexts from one token to several blocks, tables with unused entries at the end; two threads.

    An int8 cache is attended to as its dequantized contents are.
    """
    heads, kv_heads, key_dim, value_dim, threads = shape
    kept = torch.int8 if kv_dtype == "int8" else dtype
    given: Any = {"contexts": CONTEXTS, "block_size": BLOCK_SIZE, "value_dim": value_dim}
    _, step = filled_cache(kept, kv_heads, key_dim, **given)
    kernel: Any = choose_decode(WorkerSettings(threads=threads), dtype, kv_dtype)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(len(CONTEXTS), heads, key_dim, generator=generator).to(dtype)
    found = kernel.by_rule(query, 1, step, rule)
    assert found.dtype == dtype
    wanted = written_out(query, dequantized(step, torch.float32), 1, rule)
    assert (found.double() - wanted).abs().max() < within
    if rule == ScoreRule(0.3) and key_dim == value_dim and kv_dtype == "auto":
        gathered = decode_by_gather(query, 1, step, 0.3)
        assert (gathered.double() - wanted).abs().max() < within


def test_numba_survives_scores_far_apart() -> None:
    """The softmax subtracts the maximum score; much lower scores vanish and do not overflow."""
    step = filled(torch.float32, 1, 8)
    query = torch.full((len(CONTEXTS), 1, 8), 1e4)
    decode = choose_decode(WorkerSettings(), torch.float32)
    found = decode(query, 0, step, 1.0)
    assert torch.isfinite(found).all()
    assert torch.allclose(found, decode_by_gather(query, 0, step, 1.0), atol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "dtype", "within"),
    [
        (prefill_by_gather, torch.float32, 1e-5),
        (prefill_by_gather, torch.bfloat16, 4e-2),
        pytest.param(
            with_operand(BF16, attention.prefill), torch.bfloat16, 4e-2, marks=needs_bf16_dot
        ),
        (with_operand(FLOAT32, attention.prefill), torch.bfloat16, 1e-2),
        pytest.param(
            with_operand(None, attention.prefill), torch.bfloat16, 2e-2, marks=needs_tiles
        ),
    ],
)
@pytest.mark.parametrize(
    ("shape", "first", "rows"),
    [((4, 2, 16), 0, 9), ((3, 3, 8), 31, 6), ((7, 1, 128), 36, 1), ((4, 4, 112), 4, 33)],
)
def test_prefill_equals_that_by_torch_in_double_precision(
    kernel: PrefillKernel,
    dtype: torch.dtype,
    within: float,
    shape: tuple[int, int, int],
    first: int,
    rows: int,
) -> None:
    """A chunk sees the context before it, through the block table, and its own rows causally.

    Heads of eight values are left to torch.
    """
    heads, kv_heads, head_dim = shape
    step = filled(dtype, kv_heads, head_dim)
    segment, (query, key, value) = chunk_of(step, 3, first, rows, heads=heads)
    got = kernel(query, key, value, 1, segment, step, 0.3)
    expected = prefill_in_double(query, step, segment, ScoreRule(0.3)).transpose(0, 1)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=within, atol=within)


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize(
    ("rule", "first", "rows"),
    [
        (ScoreRule(0.125, window=1), 0, 9),
        (ScoreRule(0.125, window=16), 130, 70),
        (ScoreRule(0.125, window=37), 36, 1),
        (ScoreRule(0.125, window=1000), 4, 33),
        (ScoreRule(0.125, softcap=3.0), 4, 33),
        (ScoreRule(0.125, window=37, softcap=3.0), 130, 70),
        (ScoreRule(0.125, window=37, sinks=SINKS), 130, 70),
        (ScoreRule(0.125, softcap=3.0, sinks=SINKS), 4, 33),
    ],
)
def test_prefill_by_rule_is_that_of_torch(
    operand: Operand, rule: ScoreRule, first: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_operand(monkeypatch, operand)
    _, step = filled_cache(torch.bfloat16, 2, 64, contexts=[first + rows], block_size=16)
    segment, (query, *_) = chunk_of(step, 0, first, rows, heads=4)
    out = query.new_empty(query.transpose(0, 1).shape)
    attention.prefill_by_rule(query, 1, segment, step, rule, out)
    of_modules = dataclasses.replace(
        step, decode_rows=0, segments=[segment], prefill=attention.NumbaPrefill()
    )
    assert torch.equal(attend_by_rule(query, 1, of_modules, rule), out)
    wanted = prefill_in_double(query, step, segment, rule)
    torch.testing.assert_close(out.double(), wanted, rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize("operand", [FLOAT32, pytest.param(None, marks=needs_tiles, id="tiles")])
def test_skipped_rows_of_a_sparse_run_are_valid_numbers(operand: Operand) -> None:
    """Tokens are sampled from it, and logits that are not finite end a rank."""
    rows = BLOCK + 12
    _, step = filled_cache(torch.bfloat16, 2, 16, contexts=[rows], block_size=BLOCK_SIZE)
    segment, own = chunk_of(step, 0, 0, rows, heads=4)
    patches = torch.randn(4, 1, rows, 16).bfloat16()
    out = torch.full((1, rows, 4, 16), torch.nan, dtype=torch.bfloat16)
    custom = with_operand(operand, attention.prefill)
    torch.use_deterministic_algorithms(True)  # torch's allocations are filled with NaN
    try:
        with sparsely():
            attended = custom(*own, 1, segment, step, 0.3)
            with_operand(operand, attention.attend_patches)(patches, patches, patches, 0.3, out)
    finally:
        torch.use_deterministic_algorithms(False)
    assert attended.isfinite().all()
    assert out.isfinite().all()


@needs_tiles
def test_masked_positions_have_no_weight_in_tiles() -> None:
    """Not even 2^-126: if all visible values are zero, large masked ones would show."""
    rows = 40
    query = torch.randn(rows, 1, 16).bfloat16()
    values = torch.zeros(rows, 1, 16).bfloat16()
    values[-1] = 3e38
    with pytest.MonkeyPatch.context() as patch:
        use_operand(patch, None)
        found = _in_chunks(query, query, values, [rows], block_size=8)
    assert not found[:-1].any()


@pytest.mark.parametrize(
    "attend_all",
    [
        pytest.param(with_operand(BF16, attention.attend_patches), marks=needs_bf16_dot),
        with_operand(FLOAT32, attention.attend_patches),
        pytest.param(with_operand(None, attention.attend_patches), marks=needs_tiles),
    ],
)
@pytest.mark.parametrize(
    ("head_dim", "sequences", "rows"),
    [(16, 1, 1), (48, 27, 20), (80, 3, 64), (80, 2, 70), (16, 1, 300)],
)
def test_attend_all_equals_attention_written_out(
    sequences: int, rows: int, head_dim: int, attend_all: PatchKernel
) -> None:
    """Batched windows; an image by blocks: no row sees another sequence or padding."""
    heads = 3
    chance = torch.Generator().manual_seed(rows)
    inputs = torch.randn(3, heads, sequences, rows, head_dim, generator=chance).bfloat16()
    out = torch.full((sequences, rows, heads, head_dim), torch.nan, dtype=torch.bfloat16)
    query, key, value = inputs
    scaling = 1.6 * head_dim**-0.5
    attend_all(query, key, value, scaling, out)
    weights = (query.double() @ key.double().transpose(-1, -2) * scaling).softmax(-1)
    expected = (weights @ value.double()).permute(1, 2, 0, 3)
    torch.testing.assert_close(out.double(), expected, rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("threads", [1, 2])
def test_custom_prefill_gives_a_row_the_same_however_its_prompt_is_cut(
    threads: int, operand: Operand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Identical to the last bit for any split into chunks and any block table."""
    heads, kv_heads, head_dim, length = 4, 2, 48, 200
    chance = torch.Generator().manual_seed(7)
    query, keys, values = (
        torch.randn(length, count, head_dim, generator=chance).bfloat16()
        for count in (heads, kv_heads, kv_heads)
    )
    use_operand(monkeypatch, operand)
    process_pool().use(threads)
    whole = _in_chunks(query, keys, values, [length], block_size=16)
    cut = _in_chunks(query, keys, values, [1, 62, 1, 70, 66], block_size=5)
    assert torch.equal(whole, cut)


def _in_chunks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: list[int],
    *,
    block_size: int,
) -> torch.Tensor:
    """Return the result of `attention.prefill` for a prompt in chunks, [rows, heads, head_dim]."""
    length, kv_heads, head_dim = keys.shape
    cache, step = filled_cache(
        torch.bfloat16, kv_heads, head_dim, contexts=[length], block_size=block_size
    )
    slots = segment_of(step, 0, 0, length).slots()
    cache.keys[0][slots], cache.values[0][slots] = keys, values
    parts = []
    first = 0
    for rows in lengths:
        now = slice(first, first + rows)
        own = (query[now].transpose(0, 1), keys[now].transpose(0, 1), values[now].transpose(0, 1))
        made = attention.prefill(*own, 0, segment_of(step, 0, first, rows), step, 0.2)
        parts.append(made.transpose(0, 1))
        first += rows
    return torch.cat(parts)


USUAL = (6, 2, 64, 16)
"""Heads, KV heads, the size of a head, and the positions of a block."""
SCALING = 0.125
RULES = [(1, None), (16, None), (37, None), (1000, None), (None, 3.0), (37, 3.0)]


def attend(
    qkv: torch.Tensor,
    angles: torch.Tensor,
    slots: Any,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: Any,
    contexts: Any,
    *,
    block_size: int = 16,
    pool: int = 0,
    shares: int = 1,
    **rule: Any,
) -> torch.Tensor:
    """Write the keys and values of rows, and return their attention, [rows, heads, head_dim]; NaN if it is left out."""
    heads = qkv.shape[1] - 2 * keys.shape[1]
    out = torch.full((len(qkv), heads, keys.shape[2]), torch.nan).bfloat16()
    cos, sin = (bits(each.bfloat16()) for each in (angles.cos(), angles.sin()))
    decode(
        pool,
        qkv.data_ptr(),
        out.data_ptr(),
        heads_of(heads, 0, 0, 0.0, SCALING, **rule),
        RopeRows(cos, sin, slots),
        bits(keys),
        bits(values),
        tables,
        contexts,
        block_size,
        shares,
    )
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "softcap", "shape"),
    [
        *((window, softcap, USUAL) for window, softcap in RULES),
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
    cache, step = filled_cache(
        torch.bfloat16, kv_heads, head_dim, contexts=contexts, block_size=block
    )
    layer = (cache.keys[1], cache.values[1])
    hidden, last = torch.ones(len(layer[0]), dtype=torch.bool), []
    for table, length in zip(step.tables, contexts, strict=True):
        slots = context_slots(table, length, block)
        start = max(0, length - (window or length))
        hidden[slots[start // block * block : -1]] = False
        last.append(slots[-1])
    for cached in layer:
        cached[hidden] = torch.nan
    qkv = draw(len(contexts), heads + 2 * kv_heads, head_dim, seed=4)
    angles = torch.zeros(len(contexts), head_dim // 2)
    given = (qkv, angles, np.array(last), *layer, step.tables, step.contexts)
    found = attend(*given, block_size=block, softcap=softcap, window=window)
    query, *own = qkv.split((heads, kv_heads, kv_heads), dim=1)
    for cached, wanted in zip(layer, own, strict=True):
        assert torch.equal(cached[last], wanted)
    exact = LayerKv(*(cached.double().nan_to_num() for cached in layer))
    index = step.context_index(window, query.device)
    wanted = decode_by_rule(query.double(), exact, index, ScoreRule(SCALING, window, softcap))
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_rows_of_one_sequence_see_each_other_on_all_threads() -> None:
    """Draft tokens: each row attends to earlier ones, which other threads may compute, as if it ran a step later."""
    heads, kv_heads, head_dim, block = USUAL
    contexts = np.array([30, *range(393, 406), 7], dtype=np.int32)
    rows = len(contexts)
    cache, step = filled_cache(
        torch.bfloat16, kv_heads, head_dim, contexts=[405] * 3, block_size=block
    )
    tables = step.tables[[0, *[1] * (rows - 2), 2]]
    slots = np.array(
        [
            context_slots(table, length, block)[-1]
            for table, length in zip(tables, contexts, strict=True)
        ]
    )
    layer = (cache.keys[1], cache.values[1])
    for cached in layer:
        cached[slots] = torch.nan
    qkv, angles = draw(rows, heads + 2 * kv_heads, head_dim), torch.rand(rows, head_dim // 2) * 7

    def attended(parts: list[slice], **given: int) -> list[torch.Tensor]:
        keys, values = (cached.clone() for cached in layer)
        out = [
            attend(
                qkv[part],
                angles[part],
                slots[part],
                keys,
                values,
                tables[part],
                contexts[part],
                **given,
            )
            for part in parts
        ]
        return [torch.cat(out), keys, values]

    wanted = attended([slice(row, row + 1) for row in range(rows)])
    assert all(each.isfinite().all() for each in wanted)
    for _ in range(20):  # a race may go well by chance
        for shares in (1, 2):
            found = attended([slice(rows)], pool=pool_of(2), shares=shares)
            assert all(map(torch.equal, found, wanted))
