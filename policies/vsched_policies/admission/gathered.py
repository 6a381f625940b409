"""Fuller steps for a bounded wait: entries gather until a step is full, or the oldest has waited long enough."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from vsched.policy import Admission, AdmissionPolicy, AdmissionView, Count, PositiveCount
from vsched_policies.admission.packing import SECOND_NS, budget, pack


class Gathered(AdmissionPolicy, frozen=True, kw_only=True):
    """Holds entries until they fill a step, at most `deadline_s` long.

    A step is full when a bound is reached, or when the next entry would exceed one. Within the bounds it is
    `token-budget`. Waiting costs nothing: the kernel asks again when an entry arrives or the deadline has come.

    Attributes:
        max_tokens: The budget of a step. None derives it from `generate.max_batch_tokens`; 0 means no budget.
        max_items: Most entries that join in one step.
        max_blocks: Most KV blocks of the entries that join in one step; None for as many as are free.
        deadline_s: Longest that the oldest entry waits for others.
    """

    max_tokens: Count | None = None
    max_items: PositiveCount = 8
    max_blocks: PositiveCount | None = None
    deadline_s: Annotated[float, Meta(ge=0, le=60)] = 0.1

    def admit(self, view: AdmissionView) -> Admission:
        """Return a full step, what there is once the deadline has come, or until when to wait."""
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
            return True  # it runs alone, so there is nothing to wait for
        tokens = sum(entry.tokens or 0 for entry in entries)
        blocks = sum(entry.blocks for entry in entries)
        return (
            len(chosen) >= min(self.max_items, view.entries_free)
            or (tokens_max is not None and tokens >= tokens_max)
            or (view.divisible and tokens >= view.tokens_free)
            or (self.max_blocks is not None and blocks >= self.max_blocks)
        )
