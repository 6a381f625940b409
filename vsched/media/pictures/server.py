"""The picture server: `python -m vsched.media.pictures.server`, which forks the processes that decode images."""

from __future__ import annotations

import importlib
import mmap
import socket
import sys
import traceback

import msgspec
import numpy as np
import numpy.typing as npt
from setproctitle import setproctitle

from vsched.errors import RequestFailed, RequestRefused
from vsched.isolated.frames import Channel, read_frame
from vsched.isolated.server import read_setup, serve
from vsched.media.decode import DecodeLimits, inspect
from vsched.media.measure import within
from vsched.media.pictures.filling import process_encoded
from vsched.media.pictures.processes import (
    PictureOrder,
    PictureOutcome,
    PictureWork,
)
from vsched.worker.contract import ImageProcessing

NAME = "vsched: pictures"

Arena = npt.NDArray[np.uint8]
_FAILED = PictureOutcome(
    message="the image could not be processed", code="image_processing_failed", status=500
)


def _answer(channel: Channel, work: tuple[ImageProcessing, DecodeLimits], arena: Arena) -> bytes:
    """Read one call, process or inspect its image, and return the encoded outcome."""
    order = msgspec.json.decode(read_frame(channel), type=PictureOrder)
    return msgspec.json.encode(_outcome(order, read_frame(channel), work, arena))


def _outcome(
    order: PictureOrder, encoded: bytes, work: tuple[ImageProcessing, DecodeLimits], arena: Arena
) -> PictureOutcome:
    preprocessor, limits = work
    place = order.place
    try:
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
    loaded = (processing, work.limits)
    # Mapped once, so that a kept process does not fault the same pages in for every image.
    arena = np.frombuffer(mmap.mmap(arena_fd, 0), np.uint8)
    serve(socket.socket(fileno=orders), lambda channel: _answer(channel, loaded, arena))
    return 0


if __name__ == "__main__":
    sys.exit(main())
