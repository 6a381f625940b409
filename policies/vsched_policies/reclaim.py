"""Reclaim policies: ready embeddings to drop for an image of an older request."""

from __future__ import annotations

from collections.abc import Sequence

from vsched.policy import ImagePolicy, ReclaimView


class YoungestEmbedding(ImagePolicy, frozen=True, kw_only=True):
    """Drops the embeddings of the youngest requests, whose prefill is the furthest away."""

    def reclaim(self, view: ReclaimView) -> Sequence[int]:
        return range(len(view.ready) - 1, -1, -1)
