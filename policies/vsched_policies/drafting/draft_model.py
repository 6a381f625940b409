"""A small model guesses what the large one will say."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vsched.policy import DRAFT_TOKENS_MAX, Count, Draft, DraftingView, PositiveCount
from vsched_policies.drafting.trials import TriedDrafts


class ModelDrafts(TriedDrafts, frozen=True, kw_only=True):
    """Drafts what the model of `generate.draft_model` says comes next, and what a grammar forces.

    It costs a step of the draft model a token, and once for each request the prompt. So it is for few requests at a
    time; a request pauses when drafts prove right too seldom, or tokens come no faster.

    Source: Y. Leviathan, M. Kalman, Y. Matias, "Fast inference from transformers via speculative decoding", 2023.
    """

    tokens: Annotated[int, msgspec.Meta(ge=1, le=DRAFT_TOKENS_MAX)] = 4
    """Most tokens a step."""
    running_max: PositiveCount = 4
    """Most requests that run at a time while it drafts."""
    ngram: Count = 0
    """Where so many last tokens stood together before, what followed is drafted, without the model; 0 for never."""

    @property
    def guess(self) -> Draft:
        """What the model says."""
        return Draft(self.tokens, self.steps, self.ngram, model=True)

    def grant(self, view: DraftingView) -> Draft:
        """Return a trial, as much as there may be, or a pause; no drafts while many requests run."""
        if view.running > self.running_max:
            return Draft(self.tokens if view.held else 0, self.steps)
        return super().grant(view)
