"""Keep prompts, not outputs."""

from __future__ import annotations

from vsched.policy import CachePolicy, InsertionView


class Prompts(CachePolicy, frozen=True, kw_only=True):
    """Keeps prompts only: for single questions about the same documents or images, whose outputs are not sent back."""

    def keep(self, view: InsertionView) -> int:
        """Return the blocks of the prompt."""
        return max(view.prompt_blocks, view.found)
