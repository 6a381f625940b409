"""Attention by gather: each row's context is copied out of the cache for torch's attention.

It works on every device and for every data type; the kernels of the other backends are tested against it.
"""

from __future__ import annotations

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
    index = step.context_index(None, query.device)
    keys, values = step.cache.layers[layer].read(index.slots, query.dtype)
    rows, heads, head_dim = query.shape
    kv_heads = keys.shape[2]
    attended = functional.scaled_dot_product_attention(
        query.reshape(rows, kv_heads, heads // kv_heads, head_dim),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=index.is_visible[:, None, None],
        scale=scaling,
    )
    return attended.reshape(rows, heads, head_dim)
