"""What is needed last gives way."""

from __future__ import annotations

from collections.abc import Sequence

from vsched.policy import ReclaimPolicy, ReclaimView


class LeastUrgent(ReclaimPolicy, frozen=True, kw_only=True):
    """Takes embeddings of requests of the lowest priority, and of these the one whose first token is due last.

    A request without a target counts as due after all that have one. An image takes none of a higher priority than its
    own, unless it is the first that waits.
    """

    def choose(self, view: ReclaimView) -> Sequence[int]:
        """Return those of no higher priority, the least urgent first."""

        def urgency(index: int) -> tuple[int, bool, int, int]:
            one = view.ready[index]
            return one.priority, one.target_ns is not None, -(one.target_ns or 0), -index

        below = [index for index, one in enumerate(view.ready) if one.priority <= view.priority]
        return sorted(below, key=urgency)
