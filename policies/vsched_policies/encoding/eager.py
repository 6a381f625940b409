"""Encode as early as possible: every image of a request on its arrival."""

from __future__ import annotations

from collections.abc import Sequence

from vsched.policy import EncodingView, ImagePolicy


class Eager(ImagePolicy, frozen=True, kw_only=True):
    """Encodes all images of a request when it arrives, in prompt order.

    The encoder never waits for prefill to reach an image. In return, embeddings stay in memory from
    arrival until their chunk runs, and the images of a request that is cancelled early were encoded
    in vain.
    """

    def select(self, view: EncodingView) -> Sequence[int]:
        """Return every image that is not ready and not before the chunk."""
        return [
            index
            for index, item in enumerate(view.items)
            if not item.ready and item.stop > view.chunk_start
        ]
