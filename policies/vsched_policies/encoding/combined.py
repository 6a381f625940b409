"""Encode a request's images as one unit: the baseline for per-image encoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from vsched.policy import EncodingView, ImagePolicy


class Combined(ImagePolicy, frozen=True, kw_only=True):
    """Encodes all images of a request at once, as soon as a chunk needs one of them.

    The cache only has entries for the whole set of images of a request. So a conversation that adds
    an image encodes all its images again in each turn, except those in the prefix cache.
    """

    scope: ClassVar[Literal["item", "request"]] = "request"

    def select(self, view: EncodingView) -> Sequence[int]:
        """Return every image that is not ready, if the chunk needs one of them."""
        missing = [index for index, item in enumerate(view.items) if not item.ready]
        needed = any(
            view.items[index].start < view.chunk_stop and view.items[index].stop > view.chunk_start
            for index in missing
        )
        return missing if needed else []
