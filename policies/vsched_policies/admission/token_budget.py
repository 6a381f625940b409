"""A step has a budget in tokens: what bounds the time and the memory of an encoder batch."""

from __future__ import annotations

from itertools import islice

from vsched.policy import Admission, AdmissionPolicy, AdmissionView, Count, PositiveCount


class TokenBudget(AdmissionPolicy, frozen=True, kw_only=True):
    """Admits in order of arrival until the next entry would exceed a budget in tokens.

    A sum equal to the budget is admitted (A1). The first entry always is, even alone above the budget, and then runs
    alone (A2). The count cap and the token cap both hold (A3). An entry of unknown size runs alone (A4).

    Attributes:
        max_tokens: The budget of a step. None derives it from `generate.max_batch_tokens`; 0 means no budget.
        max_items: Most entries that join in one step.
    """

    max_tokens: Count | None = None
    max_items: PositiveCount = 8

    def budget(self, default_tokens: int) -> int | None:
        """Return the budget of a step, None for no budget (A13)."""
        return (default_tokens if self.max_tokens is None else self.max_tokens) or None

    def admit(self, view: AdmissionView) -> Admission:
        """Return the front of the queue, up to the budget."""
        room = self.budget(view.default_tokens)
        if view.divisible:
            # An entry may join with a part of its tokens: it takes what is left, and the next one nothing.
            room = view.tokens_free if room is None else min(room, view.tokens_free)
        admitted = 0
        for entry in islice(view.waiting, min(self.max_items, view.entries_free)):
            if entry.tokens is None:
                admitted = admitted or 1
                break
            if room is not None:
                fits = room > 0 if view.divisible else entry.tokens <= room or not admitted
                if not fits:
                    break
                room -= entry.tokens
            admitted += 1
        return Admission(range(admitted))
