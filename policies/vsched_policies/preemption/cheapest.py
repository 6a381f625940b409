"""Fewest tokens to recompute."""

from __future__ import annotations

from collections.abc import Sequence

from vsched.policy import Preemption, PreemptionMode, PreemptionView, RequestPolicy


class Cheapest(RequestPolicy, frozen=True, kw_only=True):
    """Preempts the request with the fewest computed tokens, the youngest among equals: it is the cheapest to recompute.

    With `mode = "swap"` its KV blocks are swapped to host memory instead
    (`generate.swap_memory`), as few as possible.
    """

    mode: PreemptionMode = "recompute"

    def needs(self) -> Sequence[str]:
        """Return `swap` if it swaps."""
        return ("swap",) if self.mode == "swap" else ()

    def victim(self, view: PreemptionView) -> Preemption:
        """Return the last eligible request with the fewest tokens."""
        index = min(view.eligible, key=lambda index: (view.running[index].tokens, -index))
        return Preemption(index, self.mode)
