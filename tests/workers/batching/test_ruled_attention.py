"""Attention with windows, soft-capping, sinks and values of another size, compared with the rule written out."""

from __future__ import annotations

import pytest
import torch

from tests.workers.backends.paged import filled_cache
from vsched_workers.batching import paged_attention
from vsched_workers.batching.kv_cache import LayerKv
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


def expected(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: ScoreRule
) -> torch.Tensor:
    """Return the attention of the last row of a context: query [heads, dim], keys [context, kv heads, dim]."""
    first = 0 if rule.window is None else max(0, len(keys) - rule.window)
    out = []
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        scores = keys[first:, kv_head] @ query[head] * rule.scaling
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        if rule.sinks is not None:
            scores = torch.cat([scores, rule.sinks[head : head + 1]])
        weights = scores.softmax(-1)[: len(keys) - first]
        out.append(weights @ values[first:, kv_head])
    return torch.stack(out)


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
        slots = context_slots(step.tables[row], context, BLOCK)
        wanted = expected(query[row], cache.keys[1][slots], cache.values[1][slots], rule)
        torch.testing.assert_close(found[row], wanted)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 30])
def test_prefill_is_the_rule_written_out(step: PagedStep, rule: ScoreRule, rows: int) -> None:
    cache = step.cache
    query = torch.randn(HEADS, rows, KEY_DIM, generator=torch.Generator().manual_seed(1))
    slots = torch.from_numpy(context_slots(step.tables[2], 30, BLOCK))
    keys, values = cache.keys[0], cache.values[0]
    found = prefill_by_rule(query, LayerKv(keys, values), slots, rule)
    for row in range(rows):
        seen = slots[: 30 - rows + row + 1]
        wanted = expected(query[:, row], keys[seen], values[seen], rule)
        torch.testing.assert_close(found[row], wanted)
