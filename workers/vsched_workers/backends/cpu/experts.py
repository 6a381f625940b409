"""The products of a mixture's experts in one call.

Experts are small: for few rows, starting a product from Python and on all threads takes as long as the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vsched_workers.backends.cpu.kernels.experts import multiply_experts
from vsched_workers.backends.cpu.products import KernelProduct, addresses_of
from vsched_workers.backends.cpu.threads import pool_of
from vsched_workers.batching.pause_points import report_computed
from vsched_workers.memory.sparse_runs import is_sparse
from vsched_workers.quantized.experts import MultiplyEach, one_by_one


class ExpertsTogether:
    """The products of all experts with one parameter of a mixture; see `quantized.experts.MultiplyEach`."""

    def __init__(self, products: Sequence[KernelProduct], threads: int) -> None:
        """Take products that share a shape, with inputs in their order."""
        self._one_by_one, self._threads = one_by_one(products), threads
        self._pool, self._outputs = pool_of(threads), products[0].shape[0]
        self._weights = np.concatenate([each.weight for each in products])
        self._kernels = np.array(addresses_of(products), dtype=np.int64)

    def __call__(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Multiply rows [rows, in], sorted by expert; `counts` are the rows of each expert."""
        if rows.dtype != torch.bfloat16 or is_sparse():
            return self._one_by_one(rows, counts)
        result, work, first = rows.new_empty(len(rows), self._outputs), [], 0
        for expert, count in enumerate(counts):
            if count:
                work.append((expert, first, count))
                first += count
        work.sort(key=lambda each: -each[2])  # the longest first, so that threads end together
        multiply_experts(
            self._pool,
            self._threads,
            self._weights,
            self._kernels,
            np.array(work, dtype=np.int64),
            rows.data_ptr(),
            result.data_ptr(),
        )
        report_computed(2.0 * rows.numel() * self._outputs)
        return result


def experts_together(threads: int, products: Sequence[Any]) -> MultiplyEach:
    """Return the function that multiplies by the products of experts, in one call if their kernels fit."""
    if all(isinstance(each, KernelProduct) and not each.has_order for each in products):
        return ExpertsTogether(products, threads)
    return one_by_one(products)
