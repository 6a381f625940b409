"""Prompt lookup decoding: the tokens after an earlier occurrence of the last n-gram are likely to follow again."""

from __future__ import annotations

from vsched.policy import Draft, PositiveCount
from vsched_policies.drafting.trials import TriedDrafts


class PromptLookup(TriedDrafts, frozen=True, kw_only=True):
    """Drafts the tokens after an earlier occurrence of the last n-gram, and tokens forced by a grammar.

    A step with rejected draft tokens takes longer, on some processors twice as long. So a request
    tries drafting, continues while it pays, and pauses otherwise: text without repetition costs a
    step or two per pause. Copies, edits, code and lists gain most, with few running requests.

    Source: A. Saxena, "Prompt lookup decoding", 2023.
    """

    ngram: PositiveCount = 3
    """N-gram length to match."""

    @property
    def guess(self) -> Draft:
        """The full grant."""
        return Draft(self.tokens, self.steps, self.ngram)
