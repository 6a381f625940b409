"""Last in, first out."""

from __future__ import annotations

from vsched.policy import PreemptionPolicy, PreemptionView


class Youngest(PreemptionPolicy, frozen=True, kw_only=True):
    """Preempts the request that joined last, so that those before it get done."""

    def victim(self, view: PreemptionView) -> int:
        """Return the last of the running requests."""
        return len(view.running) - 1
