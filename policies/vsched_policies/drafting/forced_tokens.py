"""Jump forward over what a grammar leaves no choice about."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vsched.policy import DRAFT_TOKENS_MAX, Draft, DraftingPolicy, DraftingView


class ForcedTokens(DraftingPolicy, frozen=True, kw_only=True):
    """Drafts what a grammar forces, such as the names and braces of a schema: such drafts are always right.

    Answers that are held to nothing are left as they are.
    """

    tokens: Annotated[int, msgspec.Meta(ge=1, le=DRAFT_TOKENS_MAX)] = 8
    """Most tokens a step."""

    def grant(self, view: DraftingView) -> Draft:
        """Return a grant for as long as the request decodes, if its answer is held to a grammar."""
        return Draft(tokens=self.tokens if view.held else 0)
