"""A token budget per step, which bounds the time and memory of an encoder batch."""

from __future__ import annotations

from vsched.policy import (
    Admission,
    AdmissionView,
    Count,
    EncodeLimits,
    PositiveCount,
    RequestPolicy,
    Seconds,
)
from vsched_policies.admission.packing import budget, pack


class TokenBudget(RequestPolicy, frozen=True, kw_only=True):
    """Admits in order of arrival until the next entry would exceed a token budget.

    A sum equal to the budget is admitted. The first entry is always admitted, even above the
    budget, and then runs alone. The limits on entries and on tokens both apply. An entry of unknown
    size runs alone.

    Attributes:
        max_tokens: The budget of a step. None derives it from `generate.max_batch_tokens`; 0 means no budget.
        max_items: Maximum number of entries that join in one step. None means the free slots for
            requests; 8 for images, but 1 on a CPU, where a batch of all but the smallest takes as
            long as one by one.
        look_ahead: Number of entries that may overtake one that does not fit yet; 0 for none.
        starvation_s: Waiting time after which an entry cannot be overtaken.
    """

    max_tokens: Count | None = None
    max_items: PositiveCount | None = None
    look_ahead: Count = 0
    starvation_s: Seconds = 5.0

    def budget(self, default_tokens: int) -> int | None:
        """Return the budget of a step, None for no budget."""
        return budget(self.max_tokens, default_tokens)

    def encode_limits(self) -> EncodeLimits:
        """Return the largest batch of images."""
        return EncodeLimits(self.max_items, self.max_tokens)

    def admit(self, view: AdmissionView) -> Admission:
        """Return the front of the queue, up to the budget."""
        chosen = pack(
            view,
            tokens_max=self.budget(view.default_tokens),
            items_max=self.max_items,
            look_ahead=self.look_ahead,
            starvation_s=self.starvation_s,
        )
        return Admission(chosen)
