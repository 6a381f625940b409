"""Decode attention on a CPU for transformers' modules, by `kernels/decode_attention.py`.

Attention of chunks and images: with AMX `tiles/attention.py`, otherwise `kernels/prefill_attention.py`.

The latter uses bfloat16 pairs if the processor multiplies them, otherwise float32.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from vsched_workers.backends.cpu.kernels import prefill_attention as kernel
from vsched_workers.backends.cpu.kernels.bf16 import BF16, FLOAT32, LOG2_E
from vsched_workers.backends.cpu.kernels.decode_attention import QueryRule, decode_queries
from vsched_workers.backends.cpu.kernels.gemm import PANEL
from vsched_workers.backends.cpu.kernels.simd import LANES, has_bf16_dot
from vsched_workers.backends.cpu.threads import pool_of, process_pool
from vsched_workers.backends.cpu.tiles import attention
from vsched_workers.backends.cpu.tiles.kernel import has_tiles
from vsched_workers.backends.reference.attention import prefill_by_gather
from vsched_workers.batching import pause_points
from vsched_workers.batching.kv_cache import KvCache, KvShape, as_array
from vsched_workers.batching.paged_attention import PatchKernel, ScoreRule
from vsched_workers.batching.paged_attention import prefill_by_rule as prefill_by_torch
from vsched_workers.memory.sparse_runs import at_most, attended_contexts, is_sparse, pieces

if TYPE_CHECKING:
    from vsched_workers.batching.paged_attention import PagedStep, Segment


TASKS_MIN = 4
"""With fewer rows per thread than this, each KV head of a row is a task."""


def shares_of(rows: int, kv_heads: int, threads: int) -> int:
    """Number of shares into which the KV heads of a row are split."""
    return kv_heads if threads > 1 and rows < TASKS_MIN * threads else 1


def sample_cache(kv_dtype: torch.dtype) -> npt.NDArray[Any]:
    """Return zero keys of a cache with a head dimension of two, for compilation."""
    cache = KvCache(
        [KvShape(1, 2, 2)], blocks=1, block_size=1, dtype=kv_dtype, allocate=torch.zeros
    )
    return cache.arrays[0][0]


_NO_SINKS = np.empty(0, dtype=np.float32)


def sinks_of(rule: ScoreRule) -> npt.NDArray[np.float32]:
    """Return the attention sinks of a rule, [heads], or an empty array."""
    if rule.sinks is None:
        return _NO_SINKS
    found: npt.NDArray[np.float32] = rule.sinks.detach().float().contiguous().numpy()
    return found


class NumbaDecode:
    """Decode kernel with all score rules, compiled for one model dtype and one KV cache dtype."""

    takes_rules = True

    def __init__(self, dtype: torch.dtype, kv_dtype: torch.dtype, threads: int) -> None:
        self._dtype = dtype
        self._kv_dtype = kv_dtype
        self._threads = threads
        self._pool = pool_of(threads)

    def warm_up(self) -> None:
        """Compile ahead of the first request."""
        cached = sample_cache(self._kv_dtype)
        rows = as_array(torch.empty(1, 1, 2, dtype=self._dtype))
        decode_queries.address_of(rows, cached, cached, rows)

    def __call__(
        self, query: torch.Tensor, layer: int, step: PagedStep, scaling: float
    ) -> torch.Tensor:
        """Return [rows, heads, head_dim] for a query of the same shape."""
        return self.by_rule(query, layer, step, ScoreRule(scaling))

    def by_rule(
        self, query: torch.Tensor, layer: int, step: PagedStep, rule: ScoreRule
    ) -> torch.Tensor:
        """Return [rows, heads, value dim] for a query [rows, heads, key dim]."""
        keys, values = step.cache.arrays[layer]
        rows, heads, _ = query.shape
        out = query.new_empty(rows, heads, step.cache.layers[layer].value_dim)
        decode_queries(
            self._pool,
            as_array(query.contiguous()),
            keys,
            values,
            step.tables,
            attended_contexts(step.contexts, self._threads),
            step.cache.block_size,
            QueryRule(
                np.float32(rule.scaling),
                rule.window or 0,
                np.float32(rule.softcap or 0.0),
                sinks_of(rule),
            ),
            shares_of(rows, keys.shape[1], self._threads),
            as_array(out),
        )
        return out


def operand() -> npt.NDArray[Any]:
    """Return the dtype tag of this processor's operands: bfloat16 pairs (VDPBF16PS), or float32."""
    return BF16 if has_bf16_dot() else FLOAT32


def attention_kernel(*, tiles: bool = True) -> tuple[Any, npt.NDArray[Any]]:
    """Return the kernel of many rows of this processor, and the dtype tag of its operands."""
    return (
        (attention.attend_in_tiles, BF16) if tiles and has_tiles() else (kernel.attend, operand())
    )


def padded_context(keys: int, head_dim: int, *, tiles: bool = True) -> tuple[int, int]:
    """Return a number of keys, and a head dimension, as they are packed."""
    padded_dim = attention.padded_head(head_dim) if tiles and has_tiles() else head_dim
    return -(-keys // PANEL) * PANEL, padded_dim


def fits(head_dim: int) -> bool:
    """Return True if a head is a whole number of vectors."""
    return head_dim % LANES == 0


def whole_vectors(head_dim: int) -> int:
    """Return a head dimension, padded to whole vectors."""
    return -(-head_dim // LANES) * LANES


def warm_up(*, tiles: bool = True) -> None:
    """Compile the attention kernel of this processor ahead of requests; without `tiles`, the one without AMX."""
    attend, tag = attention_kernel(tiles=tiles)
    attend.address_of(kernel.any_arguments(tag))


def prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    segment: Segment,
    step: PagedStep,
    scaling: float,
) -> torch.Tensor:
    """Attend for the rows of a chunk, causally; their keys and values are already in the cache."""
    if not fits(query.shape[2]):
        return prefill_by_gather(query, key, value, layer, segment, step, scaling)
    return _prefilled(query, layer, segment, step, ScoreRule(scaling))


def _prefilled(
    query: torch.Tensor, layer: int, segment: Segment, step: PagedStep, rule: ScoreRule
) -> torch.Tensor:
    """Return [heads, rows, head dim] for a query of the same shape."""
    heads, rows, head_dim = query.shape
    out = query.new_empty(rows, heads, head_dim)
    prefill_by_rule(query, layer, segment, step, rule, out)
    return out.transpose(0, 1)


class NumbaPrefill:
    """Prefill kernel for bfloat16 with all score rules."""

    __call__ = staticmethod(prefill)
    by_rule = staticmethod(_prefilled)


def prefill_by_rule(
    query: torch.Tensor,
    layer: int,
    segment: Segment,
    step: PagedStep,
    rule: ScoreRule,
    out: torch.Tensor,
) -> None:
    """Attend as `prefill`, by a score rule; torch serves head dimensions that do not fit.

    Skips keys before all windows. Writes `out` [rows, heads, head_dim].
    """
    kept, slots = step.cache.layers[layer], segment.slots()
    if not fits(query.shape[2]):
        out.copy_(prefill_by_torch(query, kept, slots, rule))
        return
    if rule.window is not None:
        slots = slots[max(segment.first + 1 - rule.window, 0) :]
    keys, values = kept.keys, kept.values
    if keys.dtype != query.dtype:
        keys, values = kept.read(slots, query.dtype)
        slots = torch.arange(len(slots))
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    _attend(query[:, None], keys, values, slots.numpy(), rule, out[None], causal=True)


def patch_kernel(*, deterministic: bool = False) -> PatchKernel:
    """Return the kernel for image patches, compiled.

    With `deterministic`, the result for a sequence does not depend on the others.
    """
    warm_up(tiles=not deterministic)
    return functools.partial(attend_patches, tiles=not deterministic)


def attend_patches(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    out: torch.Tensor,
    *,
    tiles: bool = True,
) -> None:
    """Attend within each of several sequences of one length, without a mask.

    Shape: query, key, value [heads, sequences, rows, head_dim]; writes `out` [sequences, rows, heads, head_dim].
    Without `tiles` AMX is not used. The head dimension must fit.
    """
    heads, sequences, rows, head_dim = query.shape
    keys, values = (each.flatten(1, 2) for each in (key, value))
    slots = np.arange(rows)
    rule = ScoreRule(scaling)
    operations = 4.0 * sequences * rows * rows * head_dim
    starts = range(0, heads, max(int(pause_points.PIECE_OPERATIONS / operations), 1))
    for start in pieces(starts):
        part = slice(start, start + starts.step)
        some = query[part], keys[part], values[part]
        to = out if len(starts) == 1 else torch.empty_like(out[:, :, part])
        _attend(*some, slots, rule, to, causal=False, tiles=tiles)
        if to is not out:
            out[:, :, part] = to
        pause_points.report_computed(operations * len(some[0]))


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: npt.NDArray[np.int64],
    rule: ScoreRule,
    out: torch.Tensor,
    *,
    causal: bool,
    tiles: bool = True,
) -> None:
    """Attend for queries [heads, sequences, rows, head_dim] to keys and values [kv heads, slots, head_dim].

    `slots` are those of the first sequence's keys; the keys of further sequences follow, one sequence after the
    other.
    """
    if is_sparse():
        # Skipped rows must be defined numbers: tokens are sampled from the last row's logits.
        out.zero_()
    heads, sequences, rows, head_dim = query.shape
    assert keys.stride() == values.stride(), "keys and values must have the same layout"
    query = query if query[0].is_contiguous() else query.contiguous()
    assert out.is_contiguous(), "`out` must be contiguous"
    padded_keys, padded_dim = padded_context(len(slots), head_dim, tiles=tiles)
    attend, tag = attention_kernel(tiles=tiles)
    block = kernel.BLOCK if attend is kernel.attend else attention.BLOCK
    packed = query.new_empty(len(keys) * sequences * padded_keys * 2 * padded_dim)
    scores = query.numel() // head_dim * padded_keys
    pool = process_pool()
    # Blocks computed by a sparse run: one for each thread.
    enough = -(-pool.threads // (heads * sequences))
    sinks = sinks_of(rule)
    arguments = kernel.PrefillArguments(
        query_at=query.data_ptr(),
        query_head_bytes=query.stride(0) * query.itemsize,
        heads=heads,
        sequences=sequences,
        rows=at_most(rows, block * enough),
        head_dim=head_dim,
        keys_at=keys.data_ptr(),
        values_at=values.data_ptr(),
        slot_bytes=keys.stride(1) * keys.itemsize,
        head_bytes=keys.stride(0) * keys.itemsize,
        kv_heads=len(keys),
        slots=slots,
        packed_at=packed.data_ptr(),
        padded_keys=padded_keys,
        causal=int(causal),
        window=rule.window or 0,
        factor=np.float32(rule.scaling * LOG2_E),
        softcap=np.float32((rule.softcap or 0.0) * LOG2_E),
        sinks_at=sinks.ctypes.data if len(sinks) else 0,
        out_at=out.data_ptr(),
        tag=tag,
    )
    attend(pool.state_at if scores >= kernel.PARALLEL_SCORES_MIN else 0, arguments)
