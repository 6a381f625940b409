"""How much of an encode batch ranks do in a time slice, where the same processes have steps of a generate group to run.

The kernel says how long a time slice may take. Ranks know layers only. What one takes is learned from those that were
reported, for each token of the batch: the dearest time slice of a batch counts until it is done. Where dear layers come
late (full attention behind windows), the time slice that meets them first may be longer than it should.
"""

from __future__ import annotations

import msgspec

from vsched.kernel.decisions import EncodeDecision
from vsched.wire import Paused


class EncodeSlices:
    """The time slices of one encode group.

    Attributes:
        open: Whether a batch is out that is encoded in time slices.
        busy_ns: How long its time slices took so far.
    """

    def __init__(self) -> None:
        self.open = False
        self.busy_ns = 0
        self._time_slice_ns = 0
        self._tokens = 0
        self._layer_ns = 0.0

    def begin(self, decision: EncodeDecision) -> EncodeDecision:
        """Return a batch as it is sent: with the layers of its first time slice."""
        self._time_slice_ns = decision.time_slice_ns
        self._tokens = sum(task.tokens for task in decision.tasks if not task.encoded)
        self.open = bool(self._time_slice_ns and self._tokens)
        self.busy_ns = 0
        return msgspec.structs.replace(decision, layers=self._layers()) if self.open else decision

    def go_on(self, paused: Paused) -> int:
        """Return the layers of the next time slice."""
        layer_ns = paused.busy_ns / paused.layers / self._tokens
        self._layer_ns = max(layer_ns, self._layer_ns) if self.busy_ns else layer_ns
        self.busy_ns += paused.busy_ns
        return self._layers()

    def end(self) -> bool:
        """The first rank is done with the batch; return whether it is encoded in time slices."""
        was_open, self.open = self.open, False
        return was_open

    def _layers(self) -> int:
        """Return how many layers fit: one at least, and before any was timed no more."""
        if not self._layer_ns:
            return 1
        return max(1, int(self._time_slice_ns / (self._layer_ns * self._tokens)))
