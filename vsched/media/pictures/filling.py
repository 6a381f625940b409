"""Processing of an encoded image into the arrays of its extent, in a thread or a picture process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from PIL import Image

from vsched.errors import RequestFailed
from vsched.media.decode import decode
from vsched.media.embeddings import Tensor, write_rows
from vsched.media.items import Filled, MeasuredItem, VideoOrder, within
from vsched.media.keys import content_key
from vsched.media.video import VideoLimits, read_frames
from vsched.types import ArraySpec
from vsched.worker.contract import Arrays, ImageProcessing, PixelBounds, view_arrays


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
    bounds: PixelBounds | None,
    pixels_max: int,
) -> None:
    """Fill an extent with the planned arrays of an encoded image.

    Raises:
        RequestRefused: If the image is damaged.
        RequestFailed: If the processor's output differs from its plan.
    """
    processing = within(preprocessor, bounds, pixels_max)
    _store(processing.process_image(decode(encoded, pixels_max)), specs, extent)


def process_video(
    encoded: bytes,
    order: VideoOrder,
    extents: Sequence[npt.NDArray[np.uint8]],
    preprocessor: ImageProcessing,
    limits: VideoLimits,
) -> tuple[Filled, ...]:
    """Fill the extent of each frame group of a video.

    Blocks: until all frames are decoded; the frames of one group are in memory at a time.

    Raises:
        RequestRefused: If a frame is damaged.
        RequestFailed: If the processor's output differs from its plan.
    """
    if order.files:
        images = _frame_files(encoded, order.files, limits.pixels)
    else:
        images = read_frames(encoded, list(dict.fromkeys(order.frames)), limits)
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


def _frame_files(encoded: bytes, files: Sequence[int], pixels_max: int) -> Iterator[Image.Image]:
    start = 0
    for size in files:
        yield decode(encoded[start : start + size], pixels_max)
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
