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
from vsched.media.pictures.processes import PictureOrder, PictureOutcome, PictureWork, carry_out
from vsched.media.video import VideoLimits, has_decoder
from vsched.worker.contract import ImageProcessing

NAME = "vsched: pictures"

VIDEO_NICE, INSPECTION_NICE = 5, 19
"""Niceness of a process that decodes a video, which takes longer than images, and of one that reads its header.

Most damaged files end in the latter. With 40 of them in a second on two busy cores, decode steps took 1.4 times as long
with a niceness of 5, and take 1.2 times as long with 19.
"""
STACK_BYTES = 8 << 20
WALL_S = 3600.0
_FAILED = PictureOutcome(
    message="the image could not be processed", code="image_processing_failed", status=500
)


def _answer(
    channel: Channel,
    preprocessor: ImageProcessing,
    limits: VideoLimits,
    arena: npt.NDArray[np.uint8],
) -> bytes:
    """Read one call, process or inspect its image, and return the encoded outcome."""
    order = msgspec.json.decode(read_frame(channel), type=PictureOrder)
    encoded = read_frame(channel)
    if order.video_bytes:
        os.nice(INSPECTION_NICE if order.video is None else VIDEO_NICE)
        limit_resources(
            cpu_s=limits.decode_s,
            wall_s=WALL_S,  # the engine kills it at its own deadline
            memory_bytes=order.video_bytes,
            stack_bytes=STACK_BYTES,
        )
    try:
        outcome = carry_out(
            order,
            encoded,
            preprocessor,
            limits,
            lambda place: arena[place.offset : place.offset + place.size],
        )
    except (RequestRefused, RequestFailed) as error:
        outcome = PictureOutcome(
            message=error.message,
            code=error.code,
            status=error.status,
            refused=isinstance(error, RequestRefused),
        )
    except Exception:  # noqa: BLE001 - reported to the engine, like an exception in a thread
        traceback.print_exc()
        outcome = _FAILED
    return msgspec.json.encode(outcome)


def main() -> int:
    """Serve; the arguments are three file descriptors: the socket for orders, the setup file, and the arena."""
    orders, setup, arena_fd = map(int, sys.argv[1:])
    setproctitle(NAME)
    work = msgspec.json.decode(read_setup(setup), type=PictureWork)
    module, _, name = work.recipe.maker.partition(":")
    processing = getattr(importlib.import_module(module), name)(work.recipe.settings)
    if work.takes_videos and has_decoder():
        importlib.import_module("av")  # before the processes are forked
    # Mapped once, so that a kept process does not fault the same pages in for every image.
    arena = np.frombuffer(mmap.mmap(arena_fd, 0), np.uint8)
    serve(
        socket.socket(fileno=orders),
        lambda channel: _answer(channel, processing, work.limits, arena),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
