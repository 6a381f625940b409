"""Encoding policies: the images of a request to encode now."""

from __future__ import annotations

from collections.abc import Sequence

from vsched.policy import Count, EncodingView, ImagePolicy


class ChunkAware(ImagePolicy, frozen=True, kw_only=True):
    """Encodes only the images whose tokens the next prefill chunk reads.

    Embeddings stay in memory as briefly as possible, and a request that ends early has no image
    encoded in vain.

    The encoder does not idle: the kernel asks about a request's next chunk as soon as the previous
    one is decided, so the images of chunk n + 1 are encoded while chunk n runs. Looking further
    ahead helps if encoding the images of a chunk takes longer than its prefill, and for requests
    waiting for a slot, of which otherwise only the images of the first chunk are encoded; it takes
    embedding memory.

    Attributes:
        look_ahead_chunks: Number of further chunks to include.
    """

    look_ahead_chunks: Count = 0

    def select(self, view: EncodingView) -> Sequence[int]:
        stop = view.chunk_stop + self.look_ahead_chunks * view.chunk_tokens
        return [
            index
            for index, item in enumerate(view.items)
            if not item.ready and item.start < stop and item.stop > view.chunk_start
        ]
