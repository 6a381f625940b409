"""Insertion policies: the blocks of a finished request that the prefix cache keeps."""

from __future__ import annotations

from vsched.policy import CachePolicy, Count, InsertionView


class Everything(CachePolicy, frozen=True, kw_only=True):
    """Keeps prompts and outputs: the next turn of a conversation finds both."""

    def keep(self, view: InsertionView) -> int:
        return len(view.hashes)


class Matching(CachePolicy, frozen=True, kw_only=True):
    """Keeps the requests of some tenants, with prompts of some lengths, and nothing of others.

    A tenant whose prompts are never repeated, such as a batch job, then takes no memory from
    conversations; and prompts that are quickly recomputed need not be kept.

    Attributes:
        tenants: Tenants whose requests are kept; empty for all. The empty name stands for requests
            without a tenant.
        tokens_min: Minimum length of a kept prompt.
        tokens_max: Maximum length of a kept prompt; None for no limit.
    """

    tenants: tuple[str, ...] = ()
    tokens_min: Count = 0
    tokens_max: Count | None = None

    def keep(self, view: InsertionView) -> int:
        ours = not self.tenants or view.tenant in self.tenants
        short = view.prompt_tokens < self.tokens_min
        long = self.tokens_max is not None and view.prompt_tokens > self.tokens_max
        return len(view.hashes) if ours and not (short or long) else view.found
