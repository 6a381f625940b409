"""Larger batches for a bounded delay: entries gather until a step is full, or the oldest has waited long enough."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from vsched.policy import (
    Admission,
    AdmissionView,
    Count,
    EncodeLimits,
    PositiveCount,
    RequestPolicy,
)
from vsched_policies.admission.packing import SECOND_NS, budget, pack


class Gathered(RequestPolicy, frozen=True, kw_only=True):
    """Holds entries until they fill a step, for at most `deadline_s`.

    A step is full when a limit is reached, or when the next entry would exceed one. Within the
    limits it works like `token-budget`. Waiting takes no processor time: the kernel calls the
    policy again when an entry arrives or the deadline has passed.

    Attributes:
        max_tokens: The token budget of a step. None derives it from `generate.max_batch_tokens`; 0
            means no budget.
        max_items: Maximum number of entries that join in one step.
        max_blocks: Maximum number of KV blocks of the entries that join in one step; None means the
            free blocks.
        deadline_s: Maximum time that the oldest entry waits for others.
    """

    max_tokens: Count | None = None
    max_items: PositiveCount = 8
    max_blocks: PositiveCount | None = None
    deadline_s: Annotated[float, Meta(ge=0, le=60)] = 0.1

    def encode_limits(self) -> EncodeLimits:
        """Return the largest batch of images."""
        return EncodeLimits(self.max_items, self.max_tokens)

    def admit(self, view: AdmissionView) -> Admission:
        """Return a full step, all entries after the deadline, or the time to hold until."""
        tokens_max = budget(self.max_tokens, view.default_tokens)
        blocks_max = view.blocks_free if self.max_blocks is None else self.max_blocks
        chosen = pack(view, tokens_max=tokens_max, items_max=self.max_items, blocks_max=blocks_max)
        if len(chosen) < len(view.waiting) or self._reaches_bound(view, chosen, tokens_max):
            return Admission(chosen)
        oldest_ns = min(entry.arrived_ns for entry in view.waiting)
        due_ns = oldest_ns + int(self.deadline_s * SECOND_NS)
        if view.now_ns >= due_ns:
            return Admission(chosen)
        return Admission(hold_until_ns=due_ns)

    def _reaches_bound(
        self, view: AdmissionView, chosen: list[int], tokens_max: int | None
    ) -> bool:
        entries = [view.waiting[index] for index in chosen]
        if any(entry.tokens is None for entry in entries):
            return True  # an entry of unknown size runs alone, so there is nothing to wait for
        tokens = sum(entry.tokens or 0 for entry in entries)
        blocks = sum(entry.blocks for entry in entries)
        return (
            len(chosen) >= min(self.max_items, view.entries_free)
            or (tokens_max is not None and tokens >= tokens_max)
            or (view.divisible and tokens >= view.tokens_free)
            or (self.max_blocks is not None and blocks >= self.max_blocks)
        )
