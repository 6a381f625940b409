"""First come, first served."""

from __future__ import annotations

from itertools import islice

from vsched.policy import Admission, AdmissionPolicy, AdmissionView


class Fifo(AdmissionPolicy, frozen=True, kw_only=True):
    """Admits in order of arrival, as many as there is room for; no budget of its own.

    An entry of unknown size is never counted as nothing: it joins alone (A4).
    """

    def admit(self, view: AdmissionView) -> Admission:
        """Return the front of the queue."""
        admitted = 0
        tokens_left = view.tokens_free
        for entry in islice(view.waiting, view.entries_free):
            if entry.tokens is None:
                admitted = admitted or 1
                break
            if view.divisible and tokens_left <= 0:
                break
            tokens_left -= entry.tokens
            admitted += 1
        return Admission(range(admitted))
