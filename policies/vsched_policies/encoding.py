"""Encoding policies: the images of a request to encode now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

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


class Combined(ImagePolicy, frozen=True, kw_only=True):
    """Encodes all images of a request at once, as soon as a chunk needs one of them.

    The cache only has entries for the whole set of images of a request. So a conversation that adds
    an image encodes all its images again in each turn, except those in the prefix cache.
    """

    scope: ClassVar[Literal["item", "request"]] = "request"

    def select(self, view: EncodingView) -> Sequence[int]:
        missing = [index for index, item in enumerate(view.items) if not item.ready]
        needed = any(
            view.items[index].start < view.chunk_stop and view.items[index].stop > view.chunk_start
            for index in missing
        )
        return missing if needed else []
