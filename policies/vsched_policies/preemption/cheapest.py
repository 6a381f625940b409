"""Least to compute again."""

from __future__ import annotations

from vsched.policy import Manner, Preemption, PreemptionPolicy, PreemptionView


class Cheapest(PreemptionPolicy, frozen=True, kw_only=True):
    """Preempts the request with the fewest computed tokens: the least is computed again; of several the youngest.

    With `manner = "swap"` its KV blocks are swapped to host memory instead (`generate.swap_memory`): the fewest go.
    """

    manner: Manner = "recompute"

    def victim(self, view: PreemptionView) -> Preemption:
        """Return the last of those with the fewest tokens."""
        running = view.running
        index = min(range(len(running)), key=lambda index: (running[index].tokens, -index))
        return Preemption(index, self.manner)
