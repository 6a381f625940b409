"""First come, first served."""

from __future__ import annotations

from vsched.policy import Admission, AdmissionView, Count, RequestPolicy, Seconds
from vsched_policies.admission.packing import pack


class Fifo(RequestPolicy, frozen=True, kw_only=True):
    """Admits in order of arrival, as many entries as fit; has no budget of its own.

    An entry of unknown size never counts as zero: it joins alone.

    Attributes:
        look_ahead: Number of entries that may overtake one that does not fit yet; 0 for none.
        starvation_s: Waiting time after which an entry cannot be overtaken.
    """

    look_ahead: Count = 0
    starvation_s: Seconds = 5.0

    def admit(self, view: AdmissionView) -> Admission:
        """Return the front of the queue."""
        return Admission(pack(view, look_ahead=self.look_ahead, starvation_s=self.starvation_s))
