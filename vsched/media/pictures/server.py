"""The picture server: `python -m vsched.media.pictures.server`, which forks the processes that decode images."""

from __future__ import annotations

import importlib
import mmap
import os
import socket
import sys
import traceback

import msgspec
import numpy as np
import numpy.typing as npt
from setproctitle import setproctitle

from vsched.errors import RequestFailed, RequestRefused
from vsched.isolated.server import Channel, limit_resources, read_frame, read_setup, serve
from vsched.media.decode import DecodeLimits, inspect
from vsched.media.measure import within
from vsched.media.pictures.filling import process_encoded, process_video
from vsched.media.pictures.processes import (
    PictureOrder,
    PictureOutcome,
    PictureWork,
)
from vsched.media.video import VideoLimits, has_decoder, inspect_video
from vsched.worker.contract import ImageProcessing

NAME = "vsched: pictures"

Arena = npt.NDArray[np.uint8]
Loaded = tuple[ImageProcessing, DecodeLimits, VideoLimits | None]
VIDEO_NICE = 5
"""Niceness of a process that decodes a video, which takes longer than images."""
STACK_BYTES = 8 << 20
WALL_S = 3600.0
_FAILED = PictureOutcome(
    message="the image could not be processed", code="image_processing_failed", status=500
)


def _answer(channel: Channel, work: Loaded, arena: Arena) -> bytes:
    """Read one call, process or inspect its image, and return the encoded outcome."""
    order = msgspec.json.decode(read_frame(channel), type=PictureOrder)
    return msgspec.json.encode(_outcome(order, read_frame(channel), work, arena))


def _video_outcome(
    order: PictureOrder, encoded: bytes, work: Loaded, arena: Arena
) -> PictureOutcome:
    preprocessor, limits, video_limits = work
    assert video_limits is not None, "only if the model takes videos"
    os.nice(VIDEO_NICE)
    limit_resources(
        cpu_s=video_limits.decode_s,
        wall_s=WALL_S,  # the engine kills it at its own deadline
        memory_bytes=order.video_bytes,
        stack_bytes=STACK_BYTES,
    )
    if order.video is None:
        return PictureOutcome(facts=inspect_video(encoded, video_limits))
    extents = [arena[place.offset : place.offset + place.size] for place in order.places]
    filled = process_video(encoded, order.video, extents, preprocessor, (limits, video_limits))
    return PictureOutcome(groups=filled)


def _outcome(order: PictureOrder, encoded: bytes, work: Loaded, arena: Arena) -> PictureOutcome:
    preprocessor, limits, _ = work
    place = order.place
    try:
        if order.video_bytes:
            return _video_outcome(order, encoded, work, arena)
        if place is None:
            return PictureOutcome(header=inspect(encoded, limits))
        extent = arena[place.offset : place.offset + place.size]
        bounded = within(preprocessor, order.bounds, limits.image)
        process_encoded(encoded, order.specs, extent, bounded, limits)
    except (RequestRefused, RequestFailed) as error:
        return PictureOutcome(
            message=error.message,
            code=error.code,
            status=error.status,
            refused=isinstance(error, RequestRefused),
        )
    except Exception:  # noqa: BLE001 - reported to the engine, like an exception in a thread
        traceback.print_exc()
        return _FAILED
    return PictureOutcome()


def main() -> int:
    """Serve; the arguments are three file descriptors: the socket for orders, the setup file, and the arena."""
    orders, setup, arena_fd = map(int, sys.argv[1:])
    setproctitle(NAME)
    work = msgspec.json.decode(read_setup(setup), type=PictureWork)
    module, _, name = work.recipe.maker.partition(":")
    processing = getattr(importlib.import_module(module), name)(work.recipe.settings)
    loaded = (processing, work.limits, work.video_limits)
    if work.video_limits is not None and has_decoder():
        importlib.import_module("av")  # before the processes are forked
    # Mapped once, so that a kept process does not fault the same pages in for every image.
    arena = np.frombuffer(mmap.mmap(arena_fd, 0), np.uint8)
    serve(socket.socket(fileno=orders), lambda channel: _answer(channel, loaded, arena))
    return 0


if __name__ == "__main__":
    sys.exit(main())
