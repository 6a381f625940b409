"""Prompt lookup: what came after the last tokens before may come again."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vsched.policy import (
    DRAFT_TOKENS_MAX,
    Draft,
    DraftingPolicy,
    DraftingView,
    Fraction,
    PositiveCount,
)


class PromptLookup(DraftingPolicy, frozen=True, kw_only=True):
    """Drafts what followed the last tokens earlier in prompt or answer, and what a grammar forces.

    Each request begins with two tokens a step. Where most drafts prove right it gets twice as many, up to `tokens`;
    where too few do it pauses, for a wrong draft costs the time of its row. So text that does not repeat itself pays
    for a few rows only. Copies, edits, code and lists gain most; drafts pay while few requests run.

    Source: A. Saxena, "Prompt lookup decoding", 2023.
    """

    tokens: Annotated[int, msgspec.Meta(ge=1, le=DRAFT_TOKENS_MAX)] = 8
    """Most tokens a step."""
    ngram: PositiveCount = 3
    """Last tokens that must have stood together before."""
    steps: PositiveCount = 8
    """Steps after which it is judged what came of drafts."""
    accepted_min: Fraction = 0.4
    """Share of drafts that must prove right for a request to go on without a pause."""
    pause_steps: PositiveCount = 64
    """Steps of a pause."""

    def grant(self, view: DraftingView) -> Draft:
        """Return more, as much, or a pause."""
        last = view.last
        if last is None or not last.ngram:
            return Draft(min(2, self.tokens), self.steps, self.ngram)
        if view.drafted and view.accepted < self.accepted_min * view.drafted:
            return Draft(self.tokens if view.held else 0, self.pause_steps, 0)
        more = view.accepted * 4 > view.drafted * 3
        tokens = max(last.tokens, 1) * 2 if more or not last.tokens else last.tokens
        return Draft(min(tokens, self.tokens), self.steps, self.ngram)
