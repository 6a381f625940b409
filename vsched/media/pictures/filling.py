"""Processing of an encoded image into the arrays of its extent, in a thread or a picture process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from vsched.errors import RequestFailed
from vsched.faultpoints import fault_point
from vsched.media.allocator import free_image
from vsched.media.decode import DecodeLimits, decode
from vsched.media.embeddings import Tensor, write_rows
from vsched.media.keys import content_key
from vsched.media.measure import MeasuredImage, MeasuredVideo, MeasuredVideoEmbedding, within
from vsched.media.video import VideoLimits, read_frames
from vsched.types import ArraySpec
from vsched.worker.contract import (
    Arrays,
    FrameSize,
    ImageProcessing,
    Preprocessor,
    view_arrays,
)


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

    @classmethod
    def of(cls, video: MeasuredVideo, *, with_changes: bool = False) -> VideoOrder:
        """Return the order for a video."""
        plan = video.plan
        return cls(
            plan.frames,
            plan.size,
            tuple(group.arrays for group in plan.groups),
            tuple(group.tokens for group in plan.groups),
            () if video.is_file else tuple(map(len, video.content)),
            video.settings_digest,
            video.cache_salt,
            with_changes,
        )


class Filled(NamedTuple):
    """The result of filling an extent: the key of its content, and the changes of its tokens as in `PixelStore`."""

    key: bytes
    changes: bytes = b""


def process(
    image: MeasuredImage,
    extent: npt.NDArray[np.uint8],
    preprocessor: Preprocessor,
    limits: DecodeLimits,
) -> None:
    """Fill an extent with the arrays of an image, or with the rows of its embedding.

    Blocks: until the image is decoded or converted; call it in a thread of the pool.

    Raises:
        RequestRefused: If the image is damaged, or a value of the embedding is not finite.
        RequestFailed: If the processor's output differs from its plan.
    """
    if isinstance(image.content, Tensor):
        write_rows(image.content, preprocessor.info.dtype, extent)
        return
    fault_point("media.decode")
    bounded = within(preprocessor, image.bounds, limits.image)
    process_encoded(image.content, image.plan.arrays, extent, bounded, limits)


def process_video_embedding(
    video: MeasuredVideoEmbedding, extents: Sequence[npt.NDArray[np.uint8]], dtype: str
) -> tuple[Filled, ...]:
    """Fill the extent of each frame group with its rows.

    Blocks: until all rows are converted; call it in a thread of the pool.

    Raises:
        RequestRefused: If a value is not finite.
    """
    start = 0
    for group, extent in zip(video.plan.groups, extents, strict=True):
        write_rows(video.content.rows(start, start + group.tokens), dtype, extent)
        start += group.tokens
    return tuple(map(Filled, video.group_keys))


def process_encoded(
    encoded: bytes,
    specs: Sequence[ArraySpec],
    extent: npt.NDArray[np.uint8],
    preprocessor: ImageProcessing,
    limits: DecodeLimits,
) -> None:
    """Fill an extent with the planned arrays of an encoded image; see `process`."""
    decoded = decode(encoded, limits)
    try:
        arrays = preprocessor.process_image(decoded)
    finally:
        free_image(decoded)
    _store(arrays, specs, extent)


def process_video(
    encoded: bytes,
    order: VideoOrder,
    extents: Sequence[npt.NDArray[np.uint8]],
    preprocessor: ImageProcessing,
    limits: tuple[DecodeLimits, VideoLimits],
) -> list[Filled]:
    """Fill the extent of each frame group of a video.

    Blocks: until all frames are decoded; the frames of one group are in memory at a time.

    Raises:
        RequestRefused: If a frame is damaged.
        RequestFailed: If the processor's output differs from its plan.
    """
    fault_point("media.decode")
    if order.files:
        images = _frame_files(encoded, order.files, limits[0])
    else:
        images = read_frames(encoded, list(dict.fromkeys(order.frames)), limits[1])
    frames = _repeated(images, order.frames)
    count = len(order.frames) // len(order.groups)
    filled: list[Filled] = []
    before: Arrays = {}
    for specs, tokens, extent in zip(order.groups, order.tokens, extents, strict=True):
        group = [next(frames) for _ in range(count)]
        _store(preprocessor.process_frames(group, order.size), specs, extent)
        views = view_arrays(specs, extent)
        key = content_key(
            settings_digest=order.settings_digest,
            cache_salt=order.cache_salt,
            specs=msgspec.json.encode((specs, tokens)),
            arrays=[view.view(np.uint8).data for view in views.values()],
        )
        changes = b""
        if order.with_changes and before:
            changes = preprocessor.token_changes(before, views).tobytes()
        filled.append(Filled(key, changes))
        before = views
    return filled


def _repeated(images: Iterator[Image.Image], numbers: Sequence[int]) -> Iterator[Image.Image]:
    """Yield the image of each number; equal numbers are adjacent and share one."""
    image, last = None, None
    for number in numbers:
        if image is None or number != last:
            image, last = next(images), number
        yield image


def _frame_files(
    encoded: bytes, files: Sequence[int], limits: DecodeLimits
) -> Iterator[Image.Image]:
    start = 0
    for size in files:
        yield decode(encoded[start : start + size], limits)
        start += size


def _store(
    arrays: Mapping[str, npt.NDArray[Any]],
    specs: Sequence[ArraySpec],
    extent: npt.NDArray[np.uint8],
) -> None:
    """Copy arrays to an extent."""
    made = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    planned = {spec.name: (spec.dtype, spec.shape) for spec in specs}
    if made != planned:
        # A mismatch fails the request; arrays are never reshaped to fit.
        message = f"the image processor gave {_described(made)}, but planned {_described(planned)}"
        raise RequestFailed(message, code="image_processing_failed")
    for name, view in view_arrays(specs, extent).items():
        view[...] = arrays[name]


def _described(arrays: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {dtype} {list(shape)}" for name, (dtype, shape) in arrays.items())
