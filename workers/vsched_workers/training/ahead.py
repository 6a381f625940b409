"""Draws the next step's batch in a process of its own while this step's is learnt from.

Drawing takes one core a sixth of a step, and learning seldom keeps two busy. What a step learns from is a function of
the plan and its number alone, so that it does not matter where it was drawn.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import torch

from vsched.errors import VschedError
from vsched_workers.training.batches import Batch

DEADLINE_S = 300.0
"""A process that imports torch on a busy machine takes a while before its first batch."""
END_S = 5.0


class DrawnAhead:
    """Batches by step, each drawn while the one before is learnt from.

    Use as a context manager: the process ends with it.

    Args:
        start: Called in that process, once: returns what makes a step's batch. It is pickled.
    """

    def __init__(self, start: Callable[[], Callable[[int], Batch]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # A daemon, so that nothing waits for it when this process ends; it ends when the pipe does.
        self._process = context.Process(target=_draw, args=(theirs, start), daemon=True)
        self._process.start()
        theirs.close()
        self._asked: int | None = None

    def __call__(self, step: int) -> Batch:
        """Return the batch of a step.

        Raises:
            VschedError: When the process has died, or has drawn nothing for minutes.
        """
        try:
            if self._asked != step:
                if self._asked is not None:
                    self._receive()
                self._pipe.send_bytes(str(step).encode())
            drawn = self._receive()
            self._asked = step + 1
            self._pipe.send_bytes(str(self._asked).encode())
        except (EOFError, OSError) as error:
            raise VschedError(
                "the process that draws has ended; see what it wrote above"
            ) from error
        batch: Batch = pickle.loads(drawn)  # noqa: S301  # made by our own child
        return batch

    def _receive(self) -> bytes:
        if not self._pipe.poll(DEADLINE_S):
            raise VschedError(f"the process that draws has drawn nothing for {DEADLINE_S:g} s")
        return self._pipe.recv_bytes()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join(END_S)


def _draw(pipe: Connection, start: Callable[[], Callable[[int], Batch]]) -> None:
    """Answer the number of each step with its batch, until the pipe ends."""
    torch.set_num_threads(1)
    make = start()
    while True:
        try:
            step = int(pipe.recv_bytes())
        except EOFError:
            return
        # Pickled here: a pipe would send each tensor as a file of shared memory.
        pipe.send_bytes(pickle.dumps(make(step)))
