"""Prompt lookup: what followed the last tokens earlier is likely to follow again."""

from __future__ import annotations

from vsched.policy import Draft, PositiveCount
from vsched_policies.drafting.trials import TriedDrafts


class PromptLookup(TriedDrafts, frozen=True, kw_only=True):
    """Drafts what followed the last tokens earlier in prompt or answer, and what a grammar forces.

    A step with wrong drafts takes longer, on some processors twice as long. So a request tries drafts, goes on while
    they bring enough, and pauses when they do not: text that does not repeat itself pays for a step or two in each
    pause. Copies, edits, code and lists gain most, and while few requests run.

    Source: A. Saxena, "Prompt lookup decoding", 2023.
    """

    ngram: PositiveCount = 3
    """Last tokens that must have stood together before."""

    @property
    def guess(self) -> Draft:
        """What followed."""
        return Draft(self.tokens, self.steps, self.ngram)
