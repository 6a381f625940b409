"""The products of a mixture's experts in one call.

Experts are small: for few rows, starting a product from Python and on all threads takes as long as the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vsched_workers.backends.cpu.kernels.experts import multiply_experts
from vsched_workers.backends.cpu.products import KernelProduct
from vsched_workers.backends.cpu.threads import pool_of
from vsched_workers.batching.pause_points import report_computed
from vsched_workers.memory.sparse_runs import is_sparse
from vsched_workers.quantized.experts import MultiplyEach, multiply_apart


class ExpertsTogether:
    """The products of all experts with one parameter of a mixture; see `quantized.experts.MultiplyEach`."""

    def __init__(self, products: Sequence[KernelProduct], threads: int) -> None:
        """Take products that share a shape, with inputs in their order."""
        self._products, self._threads = products, threads
        self._pool, self._outputs = pool_of(threads), products[0].shape[0]
        self._weights = np.concatenate([each.weight for each in products])
        self._kernels = np.array(_addresses(products), dtype=np.int64)

    def __call__(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Multiply rows [rows, in], sorted by expert; `counts` are the rows of each expert."""
        if rows.dtype != torch.bfloat16 or is_sparse():
            return multiply_apart(self._products, rows, counts)
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


def _addresses(products: Sequence[KernelProduct]) -> list[tuple[int, int, int]]:
    """Return the addresses of the products' kernels; those of a format are looked up once, which takes long."""
    found: dict[tuple[object, ...], tuple[int, int, int]] = {}
    kinds = [(each.kernel, each.many_rows_kernel, *map(id, each.tags)) for each in products]
    for kind, product in dict(zip(kinds, products, strict=True)).items():
        found[kind] = product.addresses()
    return [found[kind] for kind in kinds]


def experts_together(threads: int, products: Sequence[Any]) -> MultiplyEach | None:
    """Return the function that multiplies rows by the products of experts; None if their kernels do not fit."""
    if all(isinstance(each, KernelProduct) and not each.has_order for each in products):
        return ExpertsTogether(products, threads)
    return None
