"""Keep what is of some tenants, or of some lengths."""

from __future__ import annotations

from vsched.policy import Count, InsertionPolicy, InsertionView


class Matching(InsertionPolicy, frozen=True, kw_only=True):
    """Keeps the requests of some tenants, with prompts of some lengths, and of the others nothing.

    A tenant whose prompts never come back, as in a batch job, then takes no place from conversations; and what is
    computed again in no time need not be kept.

    Attributes:
        tenants: Whose requests are kept; empty for those of all. The empty name is of those without a tenant.
        tokens_min: Shortest prompt that is kept.
        tokens_max: Longest prompt that is kept; None for no limit.
    """

    tenants: tuple[str, ...] = ()
    tokens_min: Count = 0
    tokens_max: Count | None = None

    def keep(self, view: InsertionView) -> int:
        """Return all blocks, or none."""
        ours = not self.tenants or view.tenant in self.tenants
        short = view.prompt_tokens < self.tokens_min
        long = self.tokens_max is not None and view.prompt_tokens > self.tokens_max
        return len(view.hashes) if ours and not (short or long) else 0
