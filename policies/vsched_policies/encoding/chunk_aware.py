"""Encode as late as possible: what the next prefill chunk reads, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from vsched.policy import EncodingPolicy, EncodingView


class ChunkAware(EncodingPolicy, frozen=True, kw_only=True):
    """Encodes only the items whose tokens the next prefill chunk reads (D1).

    Embeddings then wait in memory for as short as can be, and a request that ends early has encoded no image in vain.
    """

    def select(self, view: EncodingView) -> Sequence[int]:
        """Return the items that meet the chunk and are not ready."""
        return [
            index
            for index, item in enumerate(view.items)
            if not item.ready and item.start < view.chunk_stop and item.stop > view.chunk_start
        ]
