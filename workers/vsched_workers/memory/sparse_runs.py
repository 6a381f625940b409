"""Sparse runs: they need the memory of full runs with a fraction of the work; their results are meaningless.

Kernels and layers process long inputs piece by piece. A piece reuses the memory of the piece before, and none needs
more than the first. So a sparse run computes the first and the last piece, and, inside kernels that allocate nothing,
only enough to give each thread some work. Of identical layers, two are computed.

This is valid if memory counts when it is reserved, touched or not (`HostMemory.counts_reserved`): skipped work does not
touch its part of a result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

_Piece = TypeVar("_Piece")
_LAYERS = 2
"""The second of two layers starts while the results of the first are still held; a third needs no more memory."""

_sparse: ContextVar[Counter[Hashable] | None] = ContextVar("sparse", default=None)
"""In a sparse run, the number of identical layers seen so far."""


@contextmanager
def sparsely() -> Iterator[None]:
    """Make runs sparse until the context ends."""
    token = _sparse.set(Counter())
    try:
        yield
    finally:
        _sparse.reset(token)


def is_sparse() -> bool:
    """Return whether runs are sparse."""
    return _sparse.get() is not None


def is_left_out(layer: Hashable) -> bool:
    """Return whether a layer is skipped: in a sparse run, after two layers that need as much memory.

    `layer` is a key that determines its memory.
    """
    seen = _sparse.get()
    if seen is None:
        return False
    seen[layer] += 1
    return seen[layer] > _LAYERS


def pieces(all_pieces: Sequence[_Piece]) -> Sequence[_Piece]:
    """Return the pieces to compute; in a sparse run, the first and the last one."""
    return all_pieces if len(all_pieces) < 3 or not is_sparse() else (all_pieces[0], all_pieces[-1])


def room_for(values: torch.Tensor, *shape: int) -> torch.Tensor:
    """Allocate a result of the same type as `values`; zeroed in a sparse run.

    Skipped parts must be valid numbers, as tokens are sampled from them.
    """
    return values.new_zeros(shape) if is_sparse() else values.new_empty(shape)


def at_most(count: int, enough: int) -> int:
    """Return the count to compute within a kernel: at most `enough` in a sparse run."""
    return min(count, enough) if is_sparse() else count


def attended_contexts(contexts: npt.NDArray[np.int32], threads: int) -> npt.NDArray[np.int32]:
    """Return the context lengths of decode rows; in a sparse run, zero except for one row per thread."""
    if not is_sparse():
        return contexts
    few, every = np.zeros_like(contexts), max(len(contexts) // threads, 1)
    few[::every] = contexts[::every]
    return few
