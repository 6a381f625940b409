"""Encode as late as possible: what the next prefill chunk reads, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from vsched.policy import Count, EncodingPolicy, EncodingView


class ChunkAware(EncodingPolicy, frozen=True, kw_only=True):
    """Encodes only the items whose tokens the next prefill chunk reads.

    Embeddings then wait in memory for as short as can be, and a request that ends early has encoded no image in vain.

    The encoder does not idle meanwhile: the kernel asks about a request's next chunk as soon as the one before is
    decided, so the items of chunk n + 1 are encoded while chunk n runs. Looking further ahead matters when encoding a
    chunk's items takes longer than prefilling a chunk, and for a request that waits for a slot, of which otherwise only
    the first chunk's items are encoded; it costs embedding memory.

    Attributes:
        look_ahead_chunks: How many chunks after the next one count too.
    """

    look_ahead_chunks: Count = 0

    def select(self, view: EncodingView) -> Sequence[int]:
        """Return the items that meet the chunk and are not ready."""
        stop = view.chunk_stop + self.look_ahead_chunks * view.chunk_tokens
        return [
            index
            for index, item in enumerate(view.items)
            if not item.ready and item.start < stop and item.stop > view.chunk_start
        ]
