"""Prompt lookup: what came after the last tokens before may come again."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vsched.policy import DRAFT_TOKENS_MAX, Draft, DraftingPolicy, DraftingView, PositiveCount


class PromptLookup(DraftingPolicy, frozen=True, kw_only=True):
    """Drafts what followed the last tokens earlier in prompt or answer, and what a grammar forces.

    Each request begins with half of `tokens` a step, for half of `steps`. It goes on with all of them while steps with
    drafts bring enough, and pauses when they do not: a step with wrong drafts takes longer, on some processors twice
    as long. So text that does not repeat itself pays for a step or two in each pause. Copies, edits, code and lists
    gain most, and while few requests run.

    Source: A. Saxena, "Prompt lookup decoding", 2023.
    """

    tokens: Annotated[int, msgspec.Meta(ge=1, le=DRAFT_TOKENS_MAX)] = 8
    """Most tokens a step."""
    ngram: PositiveCount = 3
    """Last tokens that must have stood together before."""
    gain_min: Annotated[float, msgspec.Meta(ge=0)] = 1.2
    """Drafts of a step that must prove right at the mean for a request to go on without a pause."""
    steps: PositiveCount = 8
    """Steps after which it is judged what came of drafts."""
    pause_steps: PositiveCount = 128
    """Steps of a pause."""

    def grant(self, view: DraftingView) -> Draft:
        """Return a trial, as much as there may be, or a pause."""
        last = view.last
        if last is None or not last.ngram:
            return Draft((self.tokens + 1) // 2, (self.steps + 1) // 2, self.ngram)
        # A step drafts as many as it may, so this many steps had drafts.
        drafting_steps = view.drafted / max(last.tokens, 1)
        if view.drafted and view.accepted < self.gain_min * drafting_steps:
            return Draft(self.tokens if view.held else 0, self.pause_steps, 0)
        return Draft(self.tokens, self.steps, self.ngram)
