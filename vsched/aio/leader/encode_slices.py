"""Number of encoder layers per time slice, if the processes of an encode group also run steps of a generate group.

The kernel limits the duration of a time slice; ranks count layers. The time per layer and token is learned from the
reported slices: within a batch the slowest slice counts. If slow layers come late (full attention after windowed
attention), the first slice with them may take longer than the limit.
"""

from __future__ import annotations

import msgspec

from vsched.kernel.decisions import EncodeDecision
from vsched.wire import Paused


class EncodeSlices:
    """The time slices of one encode group.

    Attributes:
        open: Whether a batch in flight is encoded in time slices.
        busy_ns: Total time of its slices so far.
    """

    def __init__(self) -> None:
        self.open = False
        self.busy_ns = 0
        self._time_slice_ns = 0
        self._tokens = 0
        self._layer_ns = 0.0

    def begin(self, decision: EncodeDecision) -> EncodeDecision:
        """Return a batch with the number of layers of its first time slice."""
        self._time_slice_ns = decision.time_slice_ns
        self._tokens = sum(task.tokens for task in decision.tasks if not task.encoded)
        self.open = bool(self._time_slice_ns and self._tokens)
        self.busy_ns = 0
        return msgspec.structs.replace(decision, layers=self._layers()) if self.open else decision

    def go_on(self, paused: Paused) -> int:
        """Return the number of layers of the next time slice."""
        layer_ns = paused.busy_ns / paused.layers / self._tokens
        self._layer_ns = max(layer_ns, self._layer_ns) if self.busy_ns else layer_ns
        self.busy_ns += paused.busy_ns
        return self._layers()

    def end(self) -> bool:
        """Note the end of the batch; return True if it was encoded in time slices."""
        was_open, self.open = self.open, False
        return was_open

    def _layers(self) -> int:
        """Return the number of layers that fit, at least one; one before the first measurement."""
        if not self._layer_ns:
            return 1
        return max(1, int(self._time_slice_ns / (self._layer_ns * self._tokens)))
