"""Decode attention on a CPU for transformers' modules, by `kernels/decode_attention.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from vsched_workers.backends.cpu.kernels.decode_attention import decode_queries
from vsched_workers.backends.cpu.threads import pool_of
from vsched_workers.batching.kv_cache import KvCache, KvShape
from vsched_workers.memory.sparse_runs import attended_contexts

if TYPE_CHECKING:
    from vsched_workers.batching.paged_attention import PagedStep

TASKS_MIN = 4
"""With fewer rows per thread than this, each KV head of a row is a task."""


def shares_of(rows: int, kv_heads: int, threads: int) -> int:
    """Number of shares into which the KV heads of a row are split."""
    return kv_heads if threads > 1 and rows < TASKS_MIN * threads else 1


def sample_cache(kv_dtype: torch.dtype, *, slots: int) -> npt.NDArray[Any]:
    """Return zero keys of a cache with a head dimension of two, for compilation."""
    cache = KvCache(
        [KvShape(1, 2, 2)], blocks=slots, block_size=1, dtype=kv_dtype, allocate=torch.zeros
    )
    return cache.arrays[0][0]


class NumbaDecode:
    """Decode kernel, compiled for one model dtype and one KV cache dtype."""

    def __init__(self, dtype: torch.dtype, kv_dtype: torch.dtype, threads: int) -> None:
        self._dtype = dtype
        self._kv_dtype = kv_dtype
        self._threads = threads
        self._pool = pool_of(threads)

    def warm_up(self) -> None:
        """Compile ahead of the first request."""
        cached = sample_cache(self._kv_dtype, slots=2)
        query = np.zeros((1, 1, 2), dtype=np.float32)
        decode_queries(
            self._pool,
            query,
            cached,
            cached,
            np.zeros((1, 1), dtype=np.int32),
            np.ones(1, dtype=np.int32),
            2,
            np.float32(1.0),
            1,
            np.empty_like(query),
        )

    def __call__(
        self, query: torch.Tensor, layer: int, step: PagedStep, scaling: float
    ) -> torch.Tensor:
        """Return [rows, heads, head_dim] for a query of the same shape."""
        keys, values = step.cache.arrays[layer]
        given: npt.NDArray[np.float32] = query.float().contiguous().numpy()
        out = np.empty(given.shape, dtype=np.float32)
        decode_queries(
            self._pool,
            given,
            keys,
            values,
            step.tables,
            attended_contexts(step.contexts, self._threads),
            step.cache.block_size,
            np.float32(scaling),
            shares_of(len(given), keys.shape[1], self._threads),
            out,
        )
        return torch.from_numpy(out).to(self._dtype)
