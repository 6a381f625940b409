"""Runs that are to show what memory they take, with a fraction of the work: their results are of no use.

Kernels and layers take long inputs piece by piece. A piece takes the memory that the one before it gave back, and none
takes more than the first. So in such a run the first and the last piece are computed, and of what a kernel does without
taking memory, as much as gives each thread something to do. Of layers that are alike, two are computed.

It holds where memory counts when it is reserved, touched or not (`HostMemory.counts_reserved`): what is left out does
not touch its part of a result.
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
"""The second of two layers starts while what the first one took is still held; a third takes no more."""

_sparse: ContextVar[Counter[Hashable] | None] = ContextVar("sparse", default=None)
"""Where runs are sparse, how many layers were seen that are alike."""


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
    """Return whether a layer is left out: where runs are sparse, and two that took as much have been computed.

    `layer` is what decides how much it takes.
    """
    seen = _sparse.get()
    if seen is None:
        return False
    seen[layer] += 1
    return seen[layer] > _LAYERS


def pieces(all_pieces: Sequence[_Piece]) -> Sequence[_Piece]:
    """Return the pieces that are computed one after the other: the first and the last where runs are sparse."""
    return all_pieces if len(all_pieces) < 3 or not is_sparse() else (all_pieces[0], all_pieces[-1])


def room_for(values: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return memory for values of the same type, to be written; zeros where runs are sparse.

    What is left out must not be nonsense: tokens are drawn from what comes of it.
    """
    return values.new_zeros(shape) if is_sparse() else values.new_empty(shape)


def at_most(count: int, enough: int) -> int:
    """Return how much of a count is computed within a kernel: no more than is enough where runs are sparse."""
    return min(count, enough) if is_sparse() else count


def attended_contexts(contexts: npt.NDArray[np.int32], threads: int) -> npt.NDArray[np.int32]:
    """Return what decode rows attend to: where runs are sparse, all of it for as few rows as each thread meets one."""
    if not is_sparse():
        return contexts
    few, every = np.zeros_like(contexts), max(len(contexts) // threads, 1)
    few[::every] = contexts[::every]
    return few
