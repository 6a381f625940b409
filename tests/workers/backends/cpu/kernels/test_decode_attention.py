"""Decode attention by score rules, and of draft tokens of one sequence on several threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from tests.workers.backends.cpu.kernels.operands import bits, draw
from tests.workers.backends.paged import filled_cache
from vsched_workers.backends.cpu.kernels.decode_attention import decode
from vsched_workers.backends.cpu.kernels.rope import RopeRows, heads_of
from vsched_workers.backends.cpu.threads import pool_of
from vsched_workers.batching.kv_cache import LayerKv
from vsched_workers.batching.paged_attention import ScoreRule, context_slots, decode_by_rule

pytestmark = pytest.mark.slow

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, SCALING = 6, 2, 64, 16, 0.125
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
    block_size: int = BLOCK_SIZE,
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


@pytest.mark.parametrize(
    ("window", "softcap", "shape"),
    [
        *((window, softcap, (HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE)) for window, softcap in RULES),
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
    layer = [cache.keys[1], cache.values[1]]
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


def test_rows_of_one_sequence_see_each_other_on_all_threads() -> None:
    """Draft tokens: each row attends to earlier ones, which other threads may compute, as if it ran a step later."""
    contexts = np.array([30, *range(393, 406), 7], dtype=np.int32)
    rows = len(contexts)
    cache, step = filled_cache(
        torch.bfloat16, KV_HEADS, HEAD_DIM, contexts=[405] * 3, block_size=BLOCK_SIZE
    )
    tables = step.tables[[0, *[1] * (rows - 2), 2]]
    slots = np.array(
        [
            context_slots(table, length, BLOCK_SIZE)[-1]
            for table, length in zip(tables, contexts, strict=True)
        ]
    )
    layer = [cache.keys[1], cache.values[1]]
    for cached in layer:
        cached[slots] = torch.nan
    qkv, angles = draw(rows, HEADS + 2 * KV_HEADS, HEAD_DIM), torch.rand(rows, HEAD_DIM // 2) * 7

    def attended(parts: list[slice], **given: int) -> list[torch.Tensor]:
        kept = [cached.clone() for cached in layer]
        out = [
            attend(
                qkv[part], angles[part], slots[part], *kept, tables[part], contexts[part], **given
            )
            for part in parts
        ]
        return [torch.cat(out), *kept]

    wanted = attended([slice(row, row + 1) for row in range(rows)])
    assert all(each.isfinite().all() for each in wanted)
    for _ in range(20):  # a race may go well by chance
        for shares in (1, 2):
            found = attended([slice(rows)], pool=pool_of(2), shares=shares)
            assert all(map(torch.equal, found, wanted))
