"""Drop the embedding needed last."""

from __future__ import annotations

from collections.abc import Sequence

from vsched.policy import ImagePolicy, ReclaimView


class LeastUrgent(ImagePolicy, frozen=True, kw_only=True):
    """Drops embeddings of requests of the lowest priority, and among these the one with the latest TTFT target.

    A request without a target comes after all that have one. An image takes no memory from a higher
    priority than its own, unless it is the first in the queue.
    """

    def reclaim(self, view: ReclaimView) -> Sequence[int]:
        """Return the embeddings of no higher priority, the least urgent first; for the front all."""

        def urgency(index: int) -> tuple[int, bool, int, int]:
            one = view.ready[index]
            return one.priority, one.target_ns is not None, -(one.target_ns or 0), -index

        below = [index for index, one in enumerate(view.ready) if one.priority <= view.priority]
        above = [index for index, one in enumerate(view.ready) if one.priority > view.priority]
        return sorted(below, key=urgency) + (above[::-1] if view.front else [])
