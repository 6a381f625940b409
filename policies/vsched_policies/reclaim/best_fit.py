"""Encode as little as possible again."""

from __future__ import annotations

from collections.abc import Sequence

from vsched.policy import ImagePolicy, ReclaimView


class BestFit(ImagePolicy, frozen=True, kw_only=True):
    """Drops the smallest embedding that frees enough; if none does alone, the largest, and then the rest likewise.

    With images of many sizes, the youngest may be a large one that is encoded again for a small
    one. Ties go to the youngest.
    """

    def reclaim(self, view: ReclaimView) -> Sequence[int]:
        """Return embeddings that free the missing pages."""
        left = list(range(len(view.ready)))
        chosen: list[int] = []
        missing = view.pages
        while missing > 0 and left:
            enough = [index for index in left if view.ready[index].pages >= missing]
            if enough:
                best = min(enough, key=lambda index: (view.ready[index].pages, -index))
            else:
                best = max(left, key=lambda index: (view.ready[index].pages, index))
            left.remove(best)
            chosen.append(best)
            missing -= view.ready[best].pages
        return chosen
