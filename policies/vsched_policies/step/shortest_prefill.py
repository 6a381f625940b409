"""The request that is nearest to its first token goes first."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from vsched.policy import StepPolicy, StepShares, StepView


class ShortestPrefill(StepPolicy, frozen=True, kw_only=True):
    """Advances the request with the fewest prompt tokens left first: short prompts pass a long one.

    What is left counts less the longer a request has been here, so that a long prompt is not passed for ever.

    Attributes:
        ageing_s: Time since its arrival after which a request counts as nearly done.
    """

    ageing_s: Annotated[float, Meta(gt=0)] = 5.0

    def share(self, view: StepView) -> StepShares:
        """Return all, the one with the least left first."""

        def left(index: int) -> tuple[float, int]:
            request = view.prefilling[index]
            age_s = (view.now_ns - request.arrived_ns) / 1e9
            return request.tokens * max(1 - age_s / self.ageing_s, 0.0), index

        return StepShares(sorted(range(len(view.prefilling)), key=left))
