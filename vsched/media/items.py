"""Images and videos of a request between the two halves of a preparation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

from vsched.media.embeddings import Tensor
from vsched.types import ArraySpec
from vsched.worker.contract import (
    FrameSize,
    ImagePlan,
    ImageProcessing,
    ItemPlan,
    PixelBounds,
    VideoPlan,
)

ImageName = tuple[str, str, bytes]
"""Cache salt of the requests, client-defined uuid of the image, and digest of the processor settings."""


class Filled(NamedTuple):
    """The result of filling an extent: the key of its content, and the changes of its tokens as in `PixelStore`."""

    key: bytes
    changes: bytes = b""


class VideoOrder(msgspec.Struct, frozen=True):
    """The frame groups of a video to process.

    Attributes:
        frames: Numbers of the frames of all groups; equal ones are adjacent.
        size: The size that they are resized to.
        groups: The arrays of each group.
        tokens: Number of tokens of each group.
        files: Sizes of the files of its frames, which follow each other; empty for a video file.
        settings_digest: Part of the content's keys, as is `cache_salt`.
        with_changes: Whether to compute the changes of tokens from group to group.
    """

    frames: tuple[int, ...]
    size: FrameSize
    groups: tuple[tuple[ArraySpec, ...], ...]
    tokens: tuple[int, ...]
    files: tuple[int, ...]
    settings_digest: bytes
    cache_salt: str
    with_changes: bool = False


@dataclass(frozen=True, slots=True)
class MeasuredItem:
    """One image or video of a request before its pixels are decoded.

    Attributes:
        content: The encoded image, the file of a video or those of its frames, or the rows of an embedding; empty for a
            reference by name.
        extents: Bytes in the arena's pixel region, of the image or each frame group, by key.
        received_bytes: Bytes that the client sent for it.
        work_bytes: Maximum host memory of a thread that fills its extents.
        bounds: Pixel bounds for resizing an image; None for the checkpoint's.
        name: Name under which it is remembered, if the client gave one.
        video: How to process a video.
        content_keys: The key of each extent's content, if it is known and another than that of the extent.
    """

    key: bytes
    plan: ItemPlan
    content: bytes | Tensor
    extents: Mapping[bytes, int]
    received_bytes: int
    work_bytes: int
    bounds: PixelBounds | None = None
    name: ImageName | None = None
    video: VideoOrder | None = None
    content_keys: tuple[bytes, ...] = ()

    @property
    def groups(self) -> tuple[ImagePlan, ...]:
        """The plan of each extent."""
        return self.plan.groups if isinstance(self.plan, VideoPlan) else (self.plan,)

    @property
    def noun(self) -> str:
        """Its name in errors."""
        return "video" if isinstance(self.plan, VideoPlan) else "image"

    @property
    def is_embedded(self) -> bool:
        """True if the client sent an embedding."""
        return isinstance(self.content, Tensor)


Images = TypeVar("Images", bound=ImageProcessing)


def within(preprocessor: Images, bounds: PixelBounds | None, pixels_max: int) -> Images:
    """Restrict a preprocessor to pixel bounds; None means the checkpoint's.

    Raises:
        RequestRefused: If the model does not support pixel bounds, or not these.
    """
    if bounds is None:
        return preprocessor
    return preprocessor.bounded(bounds, pixels_max=pixels_max)
