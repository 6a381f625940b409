"""Earliest deadline first, by the time to first token that the request asks for."""

from __future__ import annotations

from vsched.policy import Admission, AdmissionPolicy, AdmissionView, Count, PositiveCount, Seconds
from vsched_policies.admission.packing import SECOND_NS, budget, pack

MILLISECOND_NS = 1_000_000


class Deadline(AdmissionPolicy, frozen=True, kw_only=True):
    """Admits by target time, the earliest first; what can no longer meet its target goes last.

    Under load, earliest-first alone would spend itself on requests that are late already while the others become late
    too. An entry that has waited for `starvation_s` goes first, whatever its target. Within its order it is
    `token-budget`.

    Attributes:
        max_tokens: The budget of a step. None derives it from `generate.max_batch_tokens`; 0 means no budget.
        max_items: Most entries that join in one step. None for as many as there is room for: requests as slots are
            free; 8 images, but one on a CPU, where a batch of all but the smallest takes as long as one by one.
        default_target_ms: Target of an entry without one, counted from its arrival.
        lead_ms: Least time from admission to the first token: with less than this left, a target is missed already.
        starvation_s: Waiting time after which an entry goes before all that wait for less.
    """

    max_tokens: Count | None = None
    max_items: PositiveCount | None = None
    default_target_ms: Count = 1000
    lead_ms: Count = 0
    starvation_s: Seconds = 5.0

    def admit(self, view: AdmissionView) -> Admission:
        """Return the entries that are due first, up to the budget."""
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
