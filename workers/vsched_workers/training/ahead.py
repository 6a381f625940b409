"""Draws the next step's batch in a process of its own while this step's is learnt from.

Drawing takes one core a sixth of a step, and learning seldom keeps two busy. What a step learns from is a function of
the plan and its number alone, so that it does not matter where it was drawn.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from types import TracebackType
from typing import Self

import torch

from vsched_workers.training.batches import Batch

DEADLINE_S = 300.0
"""A process that imports torch on a busy machine takes a while before its first batch."""


class DrawnAhead:
    """Batches by step, each drawn while the one before is learnt from.

    Use as a context manager: the process ends with it.

    Args:
        start: Called in that process, once: returns what makes a step's batch. It is pickled.
    """

    def __init__(self, start: Callable[[], Callable[[int], Batch]]) -> None:
        self._pool = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(start,)
        )
        self._next: tuple[int, Future[bytes]] | None = None

    def __call__(self, step: int) -> Batch:
        """Return the batch of a step.

        Raises:
            TimeoutError: When the process has drawn nothing for minutes.
            concurrent.futures.process.BrokenProcessPool: When it died.
        """
        ahead = self._next
        future = ahead[1] if ahead and ahead[0] == step else self._pool.submit(_draw, step)
        self._next = (step + 1, self._pool.submit(_draw, step + 1))
        batch: Batch = pickle.loads(future.result(DEADLINE_S))  # noqa: S301  # made by our own child
        return batch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)


_maker: Callable[[int], Batch]


def _begin(start: Callable[[], Callable[[int], Batch]]) -> None:
    global _maker  # what a pool's process sets up once
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _maker = start()


def _end_with_parent() -> None:
    """A pool's process would wait for ever for work from one that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a pool's process has one"
    parent.join()
    os._exit(1)


def _draw(step: int) -> bytes:
    # Pickled here: queues would send each tensor as a file of shared memory.
    return pickle.dumps(_maker(step))
