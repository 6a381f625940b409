"""Encode as early as possible: every item of a request on its arrival."""

from __future__ import annotations

from collections.abc import Sequence

from vsched.policy import EncodingPolicy, EncodingView


class Eager(EncodingPolicy, frozen=True, kw_only=True):
    """Encodes all items of a request when it arrives, in prompt order.

    The encoder never waits for prefill to come round to an item. In return, embeddings lie in memory from arrival until
    their chunk runs, and the items of a request that is cancelled early were encoded in vain.
    """

    def select(self, view: EncodingView) -> Sequence[int]:
        """Return every item that is not ready and not behind the chunk."""
        return [
            index
            for index, item in enumerate(view.items)
            if not item.ready and item.stop > view.chunk_start
        ]
