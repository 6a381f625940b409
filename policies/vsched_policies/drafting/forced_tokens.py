"""Jump-forward decoding of tokens that a grammar forces."""

from __future__ import annotations

from typing import Annotated

import msgspec

from vsched.policy import DRAFT_TOKENS_MAX, Draft, DraftingPolicy, DraftingView

RETRY_STEPS = 64
"""Steps until more tokens are asked for, if there were too few free rows."""


class ForcedTokens(DraftingPolicy, frozen=True, kw_only=True):
    """Drafts tokens that a grammar forces, such as the keys and braces of a schema: these are always accepted.

    Requests without a grammar are not affected.
    """

    tokens: Annotated[int, msgspec.Meta(ge=1, le=DRAFT_TOKENS_MAX)] = 8
    """Maximum draft tokens per step."""

    def grant(self, view: DraftingView) -> Draft:
        """Return a grant for the whole request if it has a grammar."""
        wanted = self.tokens if view.held else 0
        tokens = min(wanted, view.rows_free)
        return Draft(tokens, steps=RETRY_STEPS if tokens < wanted else 0)
