"""The oldest request first, for as long as the step may take."""

from __future__ import annotations

from vsched.policy import StepPolicy, StepShares, StepView


class InOrder(StepPolicy, frozen=True, kw_only=True):
    """Advances requests in order of arrival, each by as much as the time and the room of the step allow."""

    def share(self, view: StepView) -> StepShares:
        """Return all, oldest first."""
        return StepShares(range(len(view.prefilling)))
