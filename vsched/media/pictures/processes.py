"""The engine's end of picture processes: images are opened, decoded and processed outside the engine.

Decoders are native code that reads the bytes of clients: a crash costs one image here. Also, Pillow and numpy hold the
interpreter's lock through single calls whose time grows with the image, and the event loop would stand still meanwhile.
A process writes to the arena. An image that takes `LARGE_BYTES` or more gets a process of its own, which ends with it,
so its memory goes back to the system; smaller ones share kept processes. A thread of the pool waits for it: order,
budget, and the handling of requests that go away are the same with and without processes.
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
from vsched.media.decode import DecodeLimits, ImageHeader, has_native_header, inspect
from vsched.media.embeddings import Embedding
from vsched.media.measure import Measured
from vsched.types import ArraySpec, Extent
from vsched.worker.capabilities import PixelBounds
from vsched.worker.contract import ImageRecipe, Preprocessor

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5
LARGE_BYTES = 64 << 20
"""Memory from which an image gets a process of its own; a photograph of 12 megapixels takes as much."""
SERVER_MODULE = "vsched.media.pictures.server"


class PictureWork(msgspec.Struct, frozen=True):
    """The setup of the server: how to build the image processing, and its limits."""

    recipe: ImageRecipe
    limits: DecodeLimits


class PictureOrder(msgspec.Struct, frozen=True):
    """One image to process, or only to inspect when it has no place; its encoded bytes follow."""

    specs: tuple[ArraySpec, ...] = ()
    place: Extent | None = None
    bounds: PixelBounds | None = None


class PictureOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one image: an empty message when its arrays are in the arena, or its header was read."""

    header: ImageHeader | None = None
    message: str = ""
    code: str = ""
    status: int = 0
    refused: bool = False


def picture_processes(
    preprocessor: Preprocessor, limits: DecodeLimits, *, arena_fd: int, deadline_s: float
) -> PictureProcesses | None:
    """Return processes for images; None if the preprocessor has no recipe for them.

    `arena_fd` is the arena, whose pixels come first, and `deadline_s` the time of one image.
    """
    make_recipe = getattr(preprocessor, "image_recipe", None)
    if make_recipe is None:
        return None
    work = msgspec.json.encode(PictureWork(make_recipe(), limits))
    return PictureProcesses(work, limits, arena_fd=arena_fd, deadline_s=deadline_s)


class PictureProcesses:
    """Processes for images; every method may be called from any thread."""

    def __init__(
        self, work: bytes, limits: DecodeLimits, *, arena_fd: int, deadline_s: float
    ) -> None:
        """Start the server that processes are forked from; `work` is a `PictureWork`."""
        self._limits = limits
        self._calls = IsolatedCalls(SERVER_MODULE, work, name="image", descriptors=(arena_fd,))
        self._deadline_s = deadline_s
        self._calls.start()

    @property
    def pid(self) -> int:
        """The process id of the server; 0 while it is not running."""
        return self._calls.pid

    def inspect(self, encoded: bytes) -> ImageHeader:
        """Read the header of an image as `vsched.media.decode.inspect` does, in a process if native code parses it.

        Raises:
            RequestRefused: When it is no image that can be served.
            RequestFailed: When the process died or took too long.
        """
        if not has_native_header(encoded):
            return inspect(encoded, self._limits)
        header = self._call(PictureOrder(), encoded, keep=True).header
        assert header is not None
        return header

    def fill(self, image: Measured, place: Extent) -> None:
        """Have a process fill an extent of the arena; nothing writes there any more when this returns.

        Blocks: for the deadline at most; call it in a thread of the pool.

        Raises:
            RequestRefused: When the image is damaged.
            RequestFailed: When the processor failed, or the process died or took too long.
        """
        assert not isinstance(image.content, Embedding)
        fault_point("media.decode")
        order = PictureOrder(image.plan.arrays, place, image.bounds)
        self._call(order, image.content, keep=image.work_bytes < LARGE_BYTES)

    def _call(self, order: PictureOrder, encoded: bytes, *, keep: bool) -> PictureOutcome:
        """Carry out an order in a process, and return its outcome, or raise it."""
        told = msgspec.json.encode(order)
        try:
            # A large image may be why its process was killed, and the memory is wanted by others.
            answer = self._calls.call(
                told, encoded, deadline_s=self._deadline_s, keep=keep, retry=keep
            )
        except CallFailedError as error:
            logger.error("the process of an image %s", error)  # noqa: TRY400 - it says it all
            raise RequestFailed(
                f"the image could not be processed: its process {error}. "
                "Remedy: send another encoding of the image, or a smaller one.",
                code="image_processing_failed",
            ) from None
        except ServerLostError as error:
            logger.error("%s", error)  # noqa: TRY400 - it says it all
            message = f"the image could not be processed: {error}. Remedy: try again later."
            raise RequestFailed(
                message, code="image_processing_failed", status=503, retry_after_s=RETRY_AFTER_S
            ) from None
        except ServerClosedError as error:
            raise RequestFailed(str(error), code="stopping", status=503) from None
        outcome = msgspec.json.decode(answer, type=PictureOutcome)
        _raise(outcome)
        return outcome

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
