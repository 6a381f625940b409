"""Runs code in time slices that has no notion of them: transformers' forward of a vision tower, layer by layer.

The code runs in a greenlet, which has a stack of its own on the same thread. A thread of its own would have other pools
of threads in torch and numba, which would fight for the cores with those that run the steps in between.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from greenlet import getcurrent, greenlet


class SlicedRun:
    """Work that stops after a number of layers until it is asked to go on."""

    def __init__(self) -> None:
        self._run: greenlet | None = None
        self._layers_left = 0

    def begin(self, work: Callable[[], None]) -> None:
        """Take work without beginning it; what was not finished is dropped."""
        self._run = greenlet(work)

    def advance(self, layers: int) -> bool:
        """Run `layers` layers, 0 for the rest; return whether the work is done. It raises what the work raises."""
        run = self._run
        assert run is not None, "nothing was begun"
        self._layers_left = layers
        try:
            run.switch()
        finally:
            if run.dead:
                self._run = None
        return run.dead

    def layer_done(self, *_: object) -> None:
        """End the time slice if this was its last layer; code that runs outside of `advance` goes on."""
        run = self._run
        if run is None or getcurrent() is not run:
            return
        self._layers_left -= 1
        if self._layers_left == 0:
            caller = run.parent
            assert caller is not None
            del run  # a run whose own stack refers to it would never be dropped
            # The mode belongs to the thread: what runs meanwhile must find it as it would be without this run.
            with torch.inference_mode(False):
                caller.switch()
