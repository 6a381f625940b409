"""No speculative decoding."""

from __future__ import annotations

from vsched.policy import Draft, DraftingPolicy, DraftingView


class NoDrafts(DraftingPolicy, frozen=True, kw_only=True):
    """Drafts nothing: every step yields one token per request."""

    def grant(self, view: DraftingView) -> Draft:
        """Return no grant."""
        return Draft()
