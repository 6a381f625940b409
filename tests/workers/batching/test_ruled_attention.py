"""Attention with windows, soft-capping, sinks and values of another size, compared with the rule written out."""

from __future__ import annotations

import pytest
import torch

from tests.workers.backends.paged import filled_cache, row_written_out
from vsched_workers.batching import paged_attention
from vsched_workers.batching.paged_attention import (
    PagedStep,
    ScoreRule,
    context_slots,
    decode_by_rule,
    prefill_by_rule,
)

HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, BLOCK = 4, 2, 8, 6, 4
CONTEXTS = (1, 9, 30, 17)
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])
RULES = [
    ScoreRule(0.5, window, softcap, sinks)
    for window, softcap, sinks in (
        *((None, None, None), (None, 2.0, None), (None, None, SINKS), (1, 2.0, SINKS)),
        *((7, None, None), (7, 2.0, SINKS), (100, None, SINKS)),
    )
]


@pytest.fixture(params=[paged_attention.PART_BYTES, 1], ids=["whole", "row by row"], autouse=True)
def part_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "PART_BYTES", request.param)


@pytest.fixture
def step() -> PagedStep:
    """Return a step over a cache with random contents, and values that are shorter than keys."""
    _, made = filled_cache(
        torch.float32, KV_HEADS, KEY_DIM, contexts=CONTEXTS, block_size=BLOCK, value_dim=VALUE_DIM
    )
    return made


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_decode_is_the_rule_written_out(step: PagedStep, rule: ScoreRule) -> None:
    cache = step.cache
    query = torch.randn(len(CONTEXTS), HEADS, KEY_DIM, generator=torch.Generator().manual_seed(1))
    index = step.context_index(rule.window, query.device)
    if rule.window is not None:
        assert index.slots.shape[1] <= rule.window, "what lies before the window is not read"
    found = decode_by_rule(query, cache.layers[1], index, rule)
    for row, context in enumerate(CONTEXTS):
        slots = torch.from_numpy(context_slots(step.tables[row], context, BLOCK))
        wanted = row_written_out(query[row], step, 1, slots, rule).float()
        torch.testing.assert_close(found[row], wanted)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 30])
def test_prefill_is_the_rule_written_out(step: PagedStep, rule: ScoreRule, rows: int) -> None:
    query = torch.randn(HEADS, rows, KEY_DIM, generator=torch.Generator().manual_seed(1))
    slots = torch.from_numpy(context_slots(step.tables[2], 30, BLOCK))
    found = prefill_by_rule(query, step.cache.layers[0], slots, rule)
    for row in range(rows):
        seen = slots[: 30 - rows + row + 1]
        wanted = row_written_out(query[:, row], step, 0, seen, rule).float()
        torch.testing.assert_close(found[row], wanted)
