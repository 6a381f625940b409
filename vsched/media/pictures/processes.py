"""The engine's end of picture processes: large images are decoded and processed outside the engine.

Pillow and numpy hold the interpreter's lock through single calls whose time grows with the image, and the event loop
stands still meanwhile. So an image that takes `LARGE_BYTES` or more gets a process of its own (`vsched.isolated`). It
writes to the arena and ends, so its memory goes back to the system, and a crash costs this one image. A thread of the
pool waits for it: order, budget, and the handling of requests that go away are the same for all images.
"""

from __future__ import annotations

import logging

import msgspec

from vsched.errors import RequestFailed, RequestRefused
from vsched.faultpoints import fault_point
from vsched.isolated.calls import (
    CallFailedError,
    IsolatedCalls,
    ServerClosedError,
    ServerLostError,
)
from vsched.media.decode import DecodeLimits
from vsched.media.embeddings import Embedding
from vsched.media.measure import Measured
from vsched.types import ArraySpec, Extent
from vsched.worker.capabilities import PixelBounds
from vsched.worker.contract import ImageRecipe, Preprocessor

logger = logging.getLogger(__name__)

LARGE_BYTES = 64 << 20
"""Images that may take so much memory get a process of their own; a photograph of 12 megapixels does."""
SERVER_MODULE = "vsched.media.pictures.server"


class PictureWork(msgspec.Struct, frozen=True):
    """The setup of the server: how to build the image processing, and its limits."""

    recipe: ImageRecipe
    limits: DecodeLimits


class PictureOrder(msgspec.Struct, frozen=True):
    """One image to process; its encoded bytes follow."""

    specs: tuple[ArraySpec, ...]
    place: Extent
    bounds: PixelBounds | None = None


class PictureOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one image: an empty message when its arrays are in the arena."""

    message: str = ""
    code: str = ""
    status: int = 0
    refused: bool = False


def picture_processes(
    preprocessor: Preprocessor, limits: DecodeLimits, *, arena_fd: int, deadline_s: float
) -> PictureProcesses | None:
    """Return processes for large images; None if the preprocessor has no recipe for them.

    `arena_fd` is the arena, whose pixels come first, and `deadline_s` the time of one image.
    """
    make_recipe = getattr(preprocessor, "image_recipe", None)
    if make_recipe is None:
        return None
    work = msgspec.json.encode(PictureWork(make_recipe(), limits))
    return PictureProcesses(work, arena_fd=arena_fd, deadline_s=deadline_s)


class PictureProcesses:
    """Processes for large images; the server that they are forked from starts with the first large image.

    Every method may be called from any thread.
    """

    def __init__(self, work: bytes, *, arena_fd: int, deadline_s: float) -> None:
        """Prepare; `work` is a `PictureWork`."""
        self._calls = IsolatedCalls(SERVER_MODULE, work, name="image", descriptors=(arena_fd,))
        self._deadline_s = deadline_s

    @staticmethod
    def takes(image: Measured) -> bool:
        """Whether an image is large."""
        return not image.is_embedded and image.work_bytes >= LARGE_BYTES

    @property
    def pid(self) -> int:
        """The process id of the server; 0 while it is not running."""
        return self._calls.pid

    def fill(self, image: Measured, place: Extent) -> None:
        """Have a process fill an extent of the arena; nothing writes there any more when this returns.

        Blocks: for the deadline at most, and until the process is gone; call it in a thread of the pool.

        Raises:
            RequestRefused: When the image is damaged.
            RequestFailed: When the processor failed, or the process died or took too long.
        """
        assert not isinstance(image.content, Embedding)
        fault_point("media.decode")
        order = msgspec.json.encode(PictureOrder(image.plan.arrays, place, image.bounds))
        try:
            answer = self._calls.call(order, image.content, deadline_s=self._deadline_s)
        except CallFailedError as error:
            logger.error("the process of an image %s", error)  # noqa: TRY400 - it says it all
            raise RequestFailed(
                f"the image could not be processed: its process {error}. "
                "Remedy: send another encoding of the image, or a smaller one.",
                code="image_processing_failed",
            ) from None
        except ServerLostError as error:
            logger.error("%s", error)  # noqa: TRY400 - it says it all
            raise RequestFailed(
                "the image could not be processed", code="image_processing_failed"
            ) from None
        except ServerClosedError as error:
            raise RequestFailed(str(error), code="stopping", status=503) from None
        _raise(msgspec.json.decode(answer, type=PictureOutcome))

    def close(self) -> None:
        """End the server, and with it every process that it forked."""
        self._calls.close()


def _raise(outcome: PictureOutcome) -> None:
    """Raise the refusal or the failure of an image, if there is one."""
    if not outcome.message:
        return
    if outcome.refused:
        raise RequestRefused(outcome.message, code=outcome.code, status=outcome.status)
    raise RequestFailed(outcome.message, code=outcome.code, status=outcome.status)
