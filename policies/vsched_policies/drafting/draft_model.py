"""Speculative decoding with a draft model."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vsched.policy import DRAFT_TOKENS_MAX, Count, Draft, DraftingView, PositiveCount
from vsched_policies.drafting.trials import TriedDrafts


class ModelDrafts(TriedDrafts, frozen=True, kw_only=True):
    """Drafts tokens with the model of `generate.draft_model`, and tokens forced by a grammar.

    A draft token costs a step of the draft model, and each request costs a prefill of its prompt in
    it. So this is for few concurrent requests; a request pauses when too few draft tokens are
    accepted, or when tokens come no faster.

    Source: Y. Leviathan, M. Kalman, Y. Matias, "Fast inference from transformers via speculative
    decoding", 2023.
    """

    tokens: Annotated[int, msgspec.Meta(ge=1, le=DRAFT_TOKENS_MAX)] = 4
    """Maximum draft tokens per step."""
    running_max: PositiveCount = 4
    """Maximum number of running requests for drafting."""
    ngram: Count = 0
    """N-gram length: if the last tokens occurred before, the tokens after them are drafted without
    the model; 0 for never.
    """

    @property
    def guess(self) -> Draft:
        """The full grant, with draft model."""
        return Draft(self.tokens, self.steps, self.ngram, model=True)

    def grant(self, view: DraftingView) -> Draft:
        """Return a trial, the full grant, or a pause; no draft model while many requests run."""
        if view.running > self.running_max:
            return Draft(self.tokens if view.held else 0, self.steps)
        return super().grant(view)
