"""Earliest deadline first, by the TTFT target of the request."""

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

MILLISECOND_NS = 1_000_000


class Deadline(RequestPolicy, frozen=True, kw_only=True):
    """Admits by target time, the earliest first; entries that can no longer meet their target go last.

    Under overload, plain earliest-deadline-first serves requests that are already late while others
    become late too. An entry that has waited for `starvation_s` goes first, whatever its target.
    Otherwise it works like `token-budget`.

    Attributes:
        max_tokens: The token budget of a step. None derives it from `generate.max_batch_tokens`; 0
            means no budget.
        max_items: Maximum number of entries that join in one step. None means the free slots for
            requests; 8 for images, but 1 on a CPU, where a batch of all but the smallest takes as
            long as one by one.
        default_target_ms: Target of an entry without one, counted from its arrival.
        lead_ms: Minimum time from admission to the first token: with less time left, a target
            counts as missed.
        starvation_s: Waiting time after which an entry goes before all that have waited for less.
    """

    max_tokens: Count | None = None
    max_items: PositiveCount | None = None
    default_target_ms: Count = 1000
    lead_ms: Count = 0
    starvation_s: Seconds = 5.0

    def encode_limits(self) -> EncodeLimits:
        """Return the largest batch of images."""
        return EncodeLimits(self.max_items, self.max_tokens)

    def admit(self, view: AdmissionView) -> Admission:
        """Return the entries with the earliest targets, up to the budget."""
        starved_since_ns = view.now_ns - int(self.starvation_s * SECOND_NS)
        reachable_ns = view.now_ns + self.lead_ms * MILLISECOND_NS

        def urgency(index: int) -> tuple[int, int]:
            entry = view.waiting[index]
            if entry.arrived_ns <= starved_since_ns:
                return (0, entry.arrived_ns)
            target_ns = entry.target_ns
            if target_ns is None:
                target_ns = entry.arrived_ns + self.default_target_ms * MILLISECOND_NS
            return (2, entry.arrived_ns) if target_ns < reachable_ns else (1, target_ns)

        chosen = pack(
            view,
            order=sorted(range(len(view.waiting)), key=urgency),
            tokens_max=budget(self.max_tokens, view.default_tokens),
            items_max=self.max_items,
        )
        return Admission(chosen)
