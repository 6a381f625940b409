"""First come, first served."""

from __future__ import annotations

from vsched.policy import Admission, AdmissionPolicy, AdmissionView, Count, Seconds
from vsched_policies.admission.packing import pack


class Fifo(AdmissionPolicy, frozen=True, kw_only=True):
    """Admits in order of arrival, as many as there is room for; no budget of its own.

    An entry of unknown size is never counted as nothing: it joins alone.

    Attributes:
        look_ahead: How many entries behind one that does not fit yet may go before it; 0 for none.
        starvation_s: Nothing passes an entry that has waited for so long.
    """

    look_ahead: Count = 0
    starvation_s: Seconds = 5.0

    def admit(self, view: AdmissionView) -> Admission:
        """Return the front of the queue."""
        return Admission(pack(view, look_ahead=self.look_ahead, starvation_s=self.starvation_s))
