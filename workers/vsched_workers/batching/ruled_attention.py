"""Attention with sliding windows, logit soft-capping, sinks, or values of another size than keys.

Written with torch alone, for every device and type. Scores and softmax are float32. Tokens before a window are not
read, and a long chunk is split, so that temporary memory stays within `PART_BYTES` or is that of one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vsched.types import Spans
from vsched_workers.batching.kv_cache import LayerKv
from vsched_workers.device_copies import sent

PART_BYTES = 64 << 20
"""Bytes of scores, or of gathered keys and values, at a time; one row may need more."""


class ScoreRule(NamedTuple):
    """Variants of the attention scores.

    Attributes:
        window: Tokens that a row attends to, itself included; None without a sliding window.
        softcap: Bound of logit soft-capping; None without it.
        sinks: [heads], attention sinks: scores in the softmax without a value; None without them.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class ContextIndex(NamedTuple):
    """Contexts of decode rows: slots int64 [rows, longest], and the mask of valid ones, [rows, longest]."""

    slots: torch.Tensor
    seen: torch.Tensor

    @classmethod
    def of(
        cls,
        tables: npt.NDArray[np.int32],
        contexts: npt.NDArray[np.int32],
        *,
        block_size: int,
        window: int | None,
        device: torch.device,
    ) -> ContextIndex:
        """Build it for block tables [rows, blocks] and context lengths [rows]."""
        starts = np.zeros_like(contexts) if window is None else np.maximum(contexts - window, 0)
        longest = int((contexts - starts).max())
        positions = starts[:, None] + np.arange(longest)
        seen = positions < contexts[:, None]
        positions = np.where(seen, positions, 0)  # slots of the first token exist, and are masked
        blocks = np.take_along_axis(tables, positions // block_size, axis=1).astype(np.int64)
        slots = blocks * block_size + positions % block_size
        return cls(sent(slots, device), sent(seen, device))


def decode_by_rule(
    query: torch.Tensor, kept: LayerKv, index: ContextIndex, rule: ScoreRule
) -> torch.Tensor:
    """Attend for decode rows.

    Shape: query [rows, heads, key dim]. Returns [rows, heads, value dim].
    """
    rows, heads, key_dim = query.shape
    kv_heads = kept.keys.shape[1]
    width = kv_heads * (key_dim + kept.value_dim) * query.itemsize
    count = max(1, PART_BYTES // max(1, index.slots.shape[1] * width))
    out = query.new_empty(rows, heads, kept.value_dim)
    for start in range(0, rows, count):
        part = slice(start, start + count)
        slots, seen = index.slots[part], index.seen[part]
        grouped = query[part].reshape(len(slots), kv_heads, heads // kv_heads, -1)
        keys, values = kept.read(slots, query.dtype)
        scores = grouped @ keys.permute(0, 2, 3, 1)
        weights = _weights(scores, seen[:, None, None], rule, (kv_heads, -1, 1))
        out[part] = (weights @ values.transpose(1, 2)).flatten(1, 2)
    return out


def prefill_by_rule(
    query: torch.Tensor,
    kept: LayerKv,
    slots: torch.Tensor,
    rule: ScoreRule,
    mutual: Spans = (),
) -> torch.Tensor:
    """Attend for the tokens of a chunk, the last ones of a context, each to the tokens up to itself.

    Attention is bidirectional within each span of `mutual`; the spans are within the context.

    Shape: query [heads, rows, key dim]; `slots` int64 [context]. Returns [rows, heads, value dim].
    """
    heads, rows, _ = query.shape
    kv_heads = kept.keys.shape[1]
    out = query.new_empty(rows, heads, kept.value_dim)
    before = len(slots) - rows
    for first, last, low, causal in _parts(rows, len(slots), heads, rule.window):
        spans = [each for each in mutual if each[0] < causal and each[1] > before + first]
        high = max([causal, *(end for _, end in spans)])
        keys, values = kept.read(slots[low:high], query.dtype)
        grouped = query[:, first:last].reshape(kv_heads, heads // kv_heads, last - first, -1)
        scores = grouped @ keys.permute(1, 2, 0)[:, None]
        position = torch.arange(before + first, before + last, device=query.device)[:, None]
        other = torch.arange(low, high, device=query.device)
        seen = other <= position
        for start, end in spans:
            seen |= (position >= start) & (position < end) & (other >= start) & (other < end)
        if rule.window is not None:
            seen &= other > position - rule.window
        weights = _weights(scores, seen, rule, (kv_heads, -1, 1, 1))
        attended = weights @ values.transpose(0, 1)[:, None]
        out[first:last] = attended.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _parts(
    rows: int, context: int, heads: int, window: int | None
) -> Iterator[tuple[int, int, int, int]]:
    """Yield rows [first, last) of a chunk with the range of tokens [low, high) that they attend to."""
    before = context - rows
    first = 0
    while first < rows:
        low = 0 if window is None else max(0, before + first - window + 1)
        count = max(1, PART_BYTES // (4 * heads * (context - low)))
        last = min(rows, first + count)
        yield first, last, low, before + last
        first = last


def _weights(
    scores: torch.Tensor, seen: torch.Tensor, rule: ScoreRule, sinks_shape: tuple[int, ...]
) -> torch.Tensor:
    """Return the softmax of scores [..., keys] over the tokens that are seen; `sinks_shape` broadcasts the sinks."""
    exact = scores.float() * rule.scaling
    if rule.softcap is not None:
        exact = torch.tanh(exact / rule.softcap) * rule.softcap
    exact = exact.masked_fill(~seen, -torch.inf)
    if rule.sinks is None:
        return exact.softmax(dim=-1).to(scores.dtype)
    sinks = rule.sinks.float().reshape(sinks_shape)
    highest = torch.maximum(exact.amax(dim=-1, keepdim=True), sinks)
    shares = torch.exp(exact - highest)
    total = shares.sum(dim=-1, keepdim=True) + torch.exp(sinks - highest)
    return (shares / total).to(scores.dtype)
