"""Least to compute again."""

from __future__ import annotations

from vsched.policy import PreemptionPolicy, PreemptionView


class Cheapest(PreemptionPolicy, frozen=True, kw_only=True):
    """Preempts the request with the fewest computed tokens: the least is computed again; of several the youngest.

    A victim is always recomputed: the kernel has nowhere to swap its KV blocks to.
    """

    def victim(self, view: PreemptionView) -> int:
        """Return the last of those with the fewest tokens."""
        return min(range(len(view.running)), key=lambda index: (view.running[index].tokens, -index))
