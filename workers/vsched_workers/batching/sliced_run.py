"""Time slices of a vision tower's forward pass, by layers or parts of layers, without changes to transformers.

The code runs in a greenlet: its own stack on the same thread. A separate thread would get further thread pools in torch
and numba, in competition for the cores with those of the steps in between.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from greenlet import getcurrent, greenlet

from vsched_workers.batching import pause_points


class SlicedRun:
    """Work that pauses after a number of layers until it is resumed."""

    def __init__(self) -> None:
        self._run: greenlet | None = None
        self._layers_left = 0
        self._operations = 0.0

    def set_work(self, work: Callable[[], None]) -> None:
        """Set the work without starting it; unfinished work is dropped."""

        def run() -> None:
            pause_points.REPORT.set(self.part_done)  # a greenlet has a context of its own
            work()

        self._run = greenlet(run)

    def advance(self, layers: int) -> bool:
        """Run `layers` layers, or the rest if 0; return whether the work is done. Raises the work's exceptions."""
        run = self._run
        assert run is not None, "nothing was begun"
        self._layers_left = layers
        try:
            run.switch()
        finally:
            if run.dead:
                self._run = None
        return run.dead

    def part_done(self, operations: float) -> None:
        """Count a part of a layer; enough of them count as a layer."""
        self._operations += operations
        if self._operations >= pause_points.PIECE_OPERATIONS:
            self.layer_done()

    def layer_done(self, *_: object) -> None:
        """End the time slice if this was its last layer; no effect outside of `advance`."""
        self._operations = 0.0
        run = self._run
        if run is None or getcurrent() is not run:
            return
        self._layers_left -= 1
        if self._layers_left == 0:
            caller = run.parent
            assert caller is not None
            del run  # a run whose own stack refers to it would never be freed
            # Inference mode is per thread: code between two slices must not inherit it from this run.
            with torch.inference_mode(False):
                caller.switch()
