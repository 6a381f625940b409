"""Processing of an encoded image into the arrays of its extent, in a thread or a picture process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from vsched.errors import RequestFailed
from vsched.isolated.calls import CallCancellation
from vsched.media.allocator import free_image
from vsched.media.decode import DecodeLimits, ImageHeader, decode, inspect
from vsched.media.embeddings import Tensor, write_rows
from vsched.media.keys import content_key
from vsched.media.measure import Filled, MeasuredItem, VideoOrder, within
from vsched.media.video import VideoLimits, inspect_video, read_frames
from vsched.types import ArraySpec, Extent
from vsched.worker.contract import (
    Arrays,
    ImageProcessing,
    Preprocessor,
    VideoFacts,
    view_arrays,
)


class LocalPictures:
    """Decodes in the calling thread, for preprocessors without an `ImageRecipe` and for simulations."""

    def __init__(
        self,
        preprocessor: Preprocessor,
        limits: tuple[DecodeLimits, VideoLimits],
        view: Callable[[Extent], npt.NDArray[np.uint8]],
    ) -> None:
        self._preprocessor = preprocessor
        self._limits = limits
        self._view = view

    def inspect(self, encoded: bytes) -> ImageHeader:
        return inspect(encoded, self._limits[0])

    def inspect_video(self, encoded: bytes, cancellation: CallCancellation) -> VideoFacts:
        del cancellation
        return inspect_video(encoded, self._limits[1])

    def fill(
        self, item: MeasuredItem, places: Sequence[Extent], cancellation: CallCancellation
    ) -> tuple[Filled, ...]:
        del cancellation
        assert isinstance(item.content, bytes)
        extents, limits = [*map(self._view, places)], self._limits
        if item.video is not None:
            return process_video(item.content, item.video, extents, self._preprocessor, limits)
        bounded = within(self._preprocessor, item.bounds, limits[0].image)
        process_encoded(item.content, item.groups[0].arrays, extents[0], bounded, limits[0])
        return (Filled(item.key),)


def fill_embedding(
    item: MeasuredItem, extents: Sequence[npt.NDArray[np.uint8]], dtype: str
) -> tuple[Filled, ...]:
    """Fill the extent of an image, or of each frame group, with the rows of its embedding.

    Blocks: until all rows are converted; call it in a thread of the pool.

    Raises:
        RequestRefused: If a value is not finite.
    """
    assert isinstance(item.content, Tensor)
    start = 0
    for group, extent in zip(item.groups, extents, strict=True):
        write_rows(item.content.rows(start, start + group.tokens), dtype, extent)
        start += group.tokens
    return tuple(map(Filled, item.content_keys))


def process_encoded(
    encoded: bytes,
    specs: Sequence[ArraySpec],
    extent: npt.NDArray[np.uint8],
    preprocessor: ImageProcessing,
    limits: DecodeLimits,
) -> None:
    """Fill an extent with the planned arrays of an encoded image.

    Raises:
        RequestRefused: If the image is damaged.
        RequestFailed: If the processor's output differs from its plan.
    """
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
) -> tuple[Filled, ...]:
    """Fill the extent of each frame group of a video.

    Blocks: until all frames are decoded; the frames of one group are in memory at a time.

    Raises:
        RequestRefused: If a frame is damaged.
        RequestFailed: If the processor's output differs from its plan.
    """
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
    return tuple(filled)


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
