"""Oldest request first, within the time of a step."""

from __future__ import annotations

from vsched.policy import RequestPolicy, StepShares, StepView


class InOrder(RequestPolicy, frozen=True, kw_only=True):
    """Advances requests in order of arrival, each as far as the time and the free tokens of the step allow."""

    def share(self, view: StepView) -> StepShares:
        """Return all, oldest first."""
        return StepShares(range(len(view.prefilling)))
