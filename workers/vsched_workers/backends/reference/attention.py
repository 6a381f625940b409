"""Attention by gather: each row's context is copied out of the cache for torch's attention.

It works on every device and for every data type; the kernels of the other backends are tested against it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from vsched_workers.batching.paged_attention import PagedStep, Segment


def prefill_by_gather(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    segment: Segment,
    step: PagedStep,
    scaling: float,
) -> torch.Tensor:
    """Attend for the tokens of one chunk."""
    mask = None
    if not segment.whole:
        mask = segment.mask(query.dtype)
        keys, values = step.cache.layers[layer].read(segment.slots(), query.dtype)
        key, value = keys.transpose(0, 1), values.transpose(0, 1)
    return functional.scaled_dot_product_attention(
        query[None],
        key[None],
        value[None],
        attn_mask=mask,
        is_causal=segment.whole and query.shape[1] > 1,
        scale=scaling,
        enable_gqa=True,
    )[0]


def decode_by_gather(
    query: torch.Tensor, layer: int, step: PagedStep, scaling: float
) -> torch.Tensor:
    """Attend for decode rows.

    The query heads that share a key head are laid out as its query rows, so that keys are not repeated.
    """
    gather, mask = _gather_index(step, query.device)
    keys, values = step.cache.layers[layer].read(gather, query.dtype)
    rows, heads, head_dim = query.shape
    kv_heads = keys.shape[2]
    attended = functional.scaled_dot_product_attention(
        query.reshape(rows, kv_heads, heads // kv_heads, head_dim),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask,
        scale=scaling,
    )
    return attended.reshape(rows, heads, head_dim)


def _gather_index(step: PagedStep, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots of all contexts, [rows, longest], and the mask of valid ones; computed once per step."""
    found = step.scratch.get("gather")
    if found is None:
        size = step.cache.block_size
        longest = int(step.contexts.max())
        blocks = step.tables[:, : -(-longest // size)].astype(np.int64)
        slots = (blocks[:, :, None] * size + np.arange(size)).reshape(len(blocks), -1)[:, :longest]
        seen = np.arange(longest)[None] < step.contexts[:, None]
        # A table's unused entries may hold anything; slot 0 always exists, so it can be read and masked.
        slots = np.where(seen, slots, 0)
        found = (
            torch.from_numpy(slots).to(device),
            torch.from_numpy(seen[:, None, None]).to(device),
        )
        step.scratch["gather"] = found
    gather, mask = found
    return gather, mask
