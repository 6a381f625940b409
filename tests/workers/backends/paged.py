"""A filled KV cache, and attention over it written out, for tests of kernels."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch

from vsched_workers.backends.reference.attention import decode_by_gather, prefill_by_gather
from vsched_workers.batching.kv_cache import KvCache, KvShape, LayerKv, kept_dim, to_int8
from vsched_workers.batching.paged_attention import (
    PagedStep,
    ScoreRule,
    Segment,
    context_slots,
    prefill_by_rule,
)


def filled_cache(
    dtype: torch.dtype,
    kv_heads: int,
    head_dim: int,
    *,
    contexts: Sequence[int],
    block_size: int,
    device: str = "cpu",
    value_dim: int = 0,
) -> tuple[KvCache, PagedStep]:
    """Return a cache with random contents and a step over sequences with scattered blocks.

    Values have the size of keys unless `value_dim` is another one.
    """
    columns = -(-max(contexts) // block_size)
    blocks = columns * len(contexts)
    cache = KvCache(
        [KvShape(kv_heads, head_dim, value_dim or head_dim)] * 2,
        blocks=blocks,
        block_size=block_size,
        dtype=dtype,
        allocate=functools.partial(torch.zeros, device=device),
    )
    generator = torch.Generator().manual_seed(0)
    for tensor in (*cache.keys, *cache.values):
        width = kept_dim(tensor.shape[2], dtype)
        drawn = torch.randn(*tensor.shape[:2], width, generator=generator)
        tensor.copy_(to_int8(drawn) if dtype == torch.int8 else drawn)
    shuffled = np.random.default_rng(0).permutation(blocks).astype(np.int32)
    tables = np.zeros((len(contexts), columns), dtype=np.int32)
    for row, context in enumerate(contexts):
        count = -(-context // block_size)
        tables[row, :count] = shuffled[row * columns : row * columns + count]
    step = PagedStep(
        cache=cache,
        decode=decode_by_gather,
        prefill=prefill_by_gather,
        slots=torch.zeros(0, dtype=torch.int64),
        decode_rows=len(contexts),
        tables=tables,
        contexts=np.array(contexts, dtype=np.int32),
        segments=[],
    )
    return cache, step


def dequantized(step: PagedStep, dtype: torch.dtype) -> PagedStep:
    """Return the step with the dequantized contents of its cache, in a cache of another type."""
    cache = copy.copy(step.cache)
    slots = torch.arange(len(cache.keys[0]))
    cache.layers = [LayerKv(*each.read(slots, dtype)) for each in cache.layers]
    cache.keys = [each.keys for each in cache.layers]
    cache.values = [each.values for each in cache.layers]
    return dataclasses.replace(step, cache=cache, scratch={})


def segment_of(step: PagedStep, sequence: int, first: int, rows: int, *, start: int = 0) -> Segment:
    """Return the chunk of a sequence that begins at its position `first`."""
    device = str(step.cache.keys[0].device)
    return Segment(
        step.tables[sequence],
        start=start,
        first=first,
        last=first + rows,
        block_size=step.cache.block_size,
        device=device,
        keeps_indices=device != "cpu",
    )


def chunk_of(
    step: PagedStep, sequence: int, first: int, rows: int, *, heads: int, start: int = 0
) -> tuple[Segment, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return a chunk, random queries, and its own keys and values in the last layer, [heads, rows, head_dim] each."""
    segment = segment_of(step, sequence, first, rows, start=start)
    slots = segment.slots()[first:]
    key, value = (held[-1][slots].transpose(0, 1) for held in (step.cache.keys, step.cache.values))
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(heads, rows, key.shape[-1], generator=generator)
    return segment, (query.to(key), key, value)


def prefill_in_double(
    query: torch.Tensor, step: PagedStep, segment: Segment, rule: ScoreRule
) -> torch.Tensor:
    """Return the attention of a chunk in the last layer by torch, [rows, heads, head_dim], in double precision."""
    layer = step.cache.layers[-1]
    exact = LayerKv(layer.keys.double(), layer.values.double())
    return prefill_by_rule(query.double(), exact, segment.slots(), rule)


def written_out(query: torch.Tensor, step: PagedStep, layer: int, rule: ScoreRule) -> torch.Tensor:
    """Return the attention of decode rows, in double precision on the CPU."""
    rows = []
    for row, context in enumerate(step.contexts.tolist()):
        slots = torch.from_numpy(context_slots(step.tables[row], context, step.cache.block_size))
        rows.append(row_written_out(query[row], step, layer, slots, rule))
    return torch.stack(rows)


def row_written_out(
    query: torch.Tensor, step: PagedStep, layer: int, slots: torch.Tensor, rule: ScoreRule
) -> torch.Tensor:
    """Return the attention of the last row of a context by a rule, in double precision; query [heads, head_dim]."""
    if rule.window is not None:
        slots = slots[-rule.window :]
    caches = (step.cache.keys[layer], step.cache.values[layer])
    group = query.shape[0] // caches[0].shape[1]
    keys, values = (each.cpu()[slots].double().repeat_interleave(group, dim=1) for each in caches)
    scores = torch.einsum("hd,lhd->hl", query.cpu().double(), keys) * rule.scaling
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if rule.sinks is not None:
        scores = torch.cat([scores, rule.sinks[:, None].cpu().double()], dim=1)
    weights = scores.softmax(-1)[:, : len(slots)]
    return torch.einsum("hl,lhd->hd", weights, values)
