"""The request closest to its first token goes first."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from vsched.policy import RequestPolicy, StepShares, StepView


class ShortestPrefill(RequestPolicy, frozen=True, kw_only=True):
    """Advances the request with the fewest remaining prompt tokens first: short prompts overtake a long one.

    The remaining tokens of a request are weighted down with its age, so that a long prompt is not
    overtaken forever.

    Attributes:
        ageing_s: Age at which a request counts as nearly done.
    """

    ageing_s: Annotated[float, Meta(gt=0)] = 5.0

    def share(self, view: StepView) -> StepShares:
        """Return all, the one with the fewest remaining tokens first."""

        def left(index: int) -> tuple[float, int]:
            request = view.prefilling[index]
            age_s = (view.now_ns - request.arrived_ns) / 1e9
            return request.tokens * max(1 - age_s / self.ageing_s, 0.0), index

        return StepShares(sorted(range(len(view.prefilling)), key=left))
