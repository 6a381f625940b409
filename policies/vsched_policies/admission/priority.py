"""Higher priority first, by the priority of the request."""

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
from vsched_policies.admission.packing import SECOND_NS, budget, pack


class Priority(RequestPolicy, frozen=True, kw_only=True):
    """Admits by priority, the highest first, and in order of arrival within a priority.

    The priority of an entry rises by one for every `ageing_s` of waiting, so that nothing waits
    forever. Nothing overtakes a more urgent entry that does not fit yet. Otherwise it works like
    `token-budget`.

    Attributes:
        max_tokens: The token budget of a step. None derives it from `generate.max_batch_tokens`; 0
            means no budget.
        max_items: Maximum number of entries that join in one step. None means the free slots for
            requests; 8 for images, but 1 on a CPU, where a batch of all but the smallest takes as
            long as one by one.
        ageing_s: Waiting time that raises the priority by one; 0 for no ageing, which lets a low
            priority starve.
    """

    max_tokens: Count | None = None
    max_items: PositiveCount | None = None
    ageing_s: Seconds = 10.0

    def encode_limits(self) -> EncodeLimits:
        """Return the largest batch of images."""
        return EncodeLimits(self.max_items, self.max_tokens)

    def admit(self, view: AdmissionView) -> Admission:
        """Return the most urgent entries, up to the budget."""
        ageing_ns = int(self.ageing_s * SECOND_NS)

        def aged_priority(index: int) -> int:
            entry = view.waiting[index]
            aged = (view.now_ns - entry.arrived_ns) // ageing_ns if ageing_ns else 0
            return entry.priority + aged

        order = range(len(view.waiting))
        chosen = pack(
            view,
            order=sorted(order, key=lambda index: -aged_priority(index)),
            tokens_max=budget(self.max_tokens, view.default_tokens),
            items_max=self.max_items,
        )
        return Admission(chosen)
