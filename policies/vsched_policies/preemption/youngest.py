"""Last in, first out."""

from __future__ import annotations

from collections.abc import Sequence

from vsched.policy import Preemption, PreemptionMode, PreemptionView, RequestPolicy


class Youngest(RequestPolicy, frozen=True, kw_only=True):
    """Preempts the request that joined last, so that earlier ones finish.

    It is recomputed; with `mode = "swap"` its KV blocks are swapped to host memory
    (`generate.swap_memory`).
    """

    mode: PreemptionMode = "recompute"

    def needs(self) -> Sequence[str]:
        """Return `swap` if it swaps."""
        return ("swap",) if self.mode == "swap" else ()

    def victim(self, view: PreemptionView) -> Preemption:
        """Return the last of the running requests."""
        return Preemption(len(view.running) - 1, self.mode)
