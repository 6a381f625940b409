"""The picture server: `python -m vsched.media.pictures.server`, which forks one process for each large image.

It makes the checkpoint's image processing by the engine's recipe, and has one thread, so that it can fork. What it
forks ends when the server does, and the server when the engine does.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import mmap
import os
import signal
import socket
import sys
import traceback

import msgspec
import numpy as np
from setproctitle import setproctitle

from vsched.errors import RequestFailed, RequestRefused
from vsched.media.decode import DecodeLimits
from vsched.media.measure import within
from vsched.media.pictures.filling import process_encoded
from vsched.media.pictures.processes import (
    PictureOrder,
    PictureOutcome,
    PictureWork,
    read_frame,
    send_frame,
)
from vsched.worker.contract import ImageProcessing

NAME = "vsched: pictures"
_PR_SET_PDEATHSIG = 1
_FAILED = PictureOutcome(
    message="the image could not be processed", code="image_processing_failed", status=500
)


def serve(orders: socket.socket, work: tuple[ImageProcessing, DecodeLimits], arena_fd: int) -> None:
    """Fork a process for each channel that comes in; return when the engine is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    server = os.getpid()
    while True:
        said, received, _, _ = socket.recv_fds(orders, 1, 1)
        if not said:
            return
        with socket.socket(fileno=received[0]) as channel:
            if os.fork():
                continue
            try:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
                orders.close()
                if os.getppid() == server:
                    _handle(channel, work, arena_fd)
            finally:
                os._exit(0)


def _handle(
    channel: socket.socket, work: tuple[ImageProcessing, DecodeLimits], arena_fd: int
) -> None:
    """Tell the engine of this process, and process the image that it sends."""
    socket.send_fds(channel, [b"\n"], [os.pidfd_open(os.getpid())])
    with channel.makefile("rwb") as file:
        try:
            order = msgspec.json.decode(read_frame(file), type=PictureOrder)
            encoded = read_frame(file)
        except EOFError:
            return  # nobody wants it any more
        send_frame(file, msgspec.json.encode(_outcome(order, encoded, work, arena_fd)))


def _outcome(
    order: PictureOrder, encoded: bytes, work: tuple[ImageProcessing, DecodeLimits], arena_fd: int
) -> PictureOutcome:
    preprocessor, limits = work
    place = order.place
    begin = place.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    before = place.offset - begin
    try:
        mapped = mmap.mmap(arena_fd, before + place.size, offset=begin)
        extent = np.frombuffer(mapped, np.uint8, place.size, before)
        bounded = within(preprocessor, order.bounds, limits.image)
        process_encoded(encoded, order.specs, extent, bounded, limits)
    except (RequestRefused, RequestFailed) as error:
        return PictureOutcome(
            message=error.message,
            code=error.code,
            status=error.status,
            refused=isinstance(error, RequestRefused),
        )
    except Exception:  # noqa: BLE001 - told to the engine, as a thread's would be
        traceback.print_exc()
        return _FAILED
    return PictureOutcome()


def main() -> int:
    """Serve on the socket, with the work and the arena, whose descriptors are the arguments."""
    orders, told, arena = map(int, sys.argv[1:])
    setproctitle(NAME)
    with open(told, "rb") as file:
        file.seek(0)
        work = msgspec.json.decode(file.read(), type=PictureWork)
    module, _, name = work.recipe.maker.partition(":")
    processing = getattr(importlib.import_module(module), name)(work.recipe.settings)
    gc.collect()
    gc.freeze()  # a collection in a child would copy its pages
    serve(socket.socket(fileno=orders), (processing, work.limits), arena)
    return 0


if __name__ == "__main__":
    sys.exit(main())
