"""Encode a request's images as one unit: the baseline that per-item encoding is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from vsched.policy import EncodingPolicy, EncodingView


class Combined(EncodingPolicy, frozen=True, kw_only=True):
    """Encodes all items of a request at once, as soon as a chunk needs one of them.

    The cache knows only the whole set of images of a request. So a conversation that grows by an image encodes all its
    images anew, each turn, as far as their tokens are not in the prefix cache.
    """

    scope: ClassVar[Literal["item", "request"]] = "request"

    def select(self, view: EncodingView) -> Sequence[int]:
        """Return every item that is not ready, if the chunk needs one of them."""
        missing = [index for index, item in enumerate(view.items) if not item.ready]
        needed = any(
            view.items[index].start < view.chunk_stop and view.items[index].stop > view.chunk_start
            for index in missing
        )
        return missing if needed else []
