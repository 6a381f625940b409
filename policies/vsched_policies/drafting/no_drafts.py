"""One token a step."""

from __future__ import annotations

from vsched.policy import Draft, DraftingPolicy, DraftingView


class NoDrafts(DraftingPolicy, frozen=True, kw_only=True):
    """Drafts nothing: every step brings one token of each request."""

    def grant(self, view: DraftingView) -> Draft:
        """Return no grant, for good."""
        return Draft()
