"""Decoding and processing of images and videos: orders, and the processes that carry them out.

Decoders are native code that parses client input: in a process, a crash costs one image. Also, Pillow and numpy hold
the GIL for single calls whose time grows with the image, which would block the event loop. The processes write to the
arena. An image that needs `LARGE_BYTES` or more gets its own process, whose end returns the memory to the system;
smaller ones share kept processes. A thread of the pool waits for the process: order, memory budget, and cancellation
are the same with and without processes.
"""

from __future__ import annotations

import logging
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from vsched.errors import RequestFailed, RequestRefused
from vsched.isolated.calls import (
    EXTERNAL_SIGNALS,
    RETRY_AFTER_S,
    CallCancellation,
    CallFailedError,
    IsolatedCalls,
)
from vsched.media.decode import ImageHeader, has_native_header, inspect
from vsched.media.items import Filled, MeasuredItem, VideoOrder
from vsched.media.pictures.filling import process_encoded, process_video
from vsched.media.video import HEADER_BYTES, VideoLimits, inspect_video
from vsched.types import ArraySpec, Extent
from vsched.worker.contract import (
    ImageProcessing,
    ImageRecipe,
    PixelBounds,
    Preprocessor,
    VideoFacts,
)

logger = logging.getLogger(__name__)

LARGE_BYTES = 64 << 20
"""Memory from which an image gets its own process; a photograph of 12 megapixels needs as much."""
SERVER_MODULE = "vsched.media.pictures.server"


class PictureWork(msgspec.Struct, frozen=True):
    """The setup of the server: the recipe of the image processor, and the limits of decoding."""

    recipe: ImageRecipe
    limits: VideoLimits
    takes_videos: bool


class PictureOrder(msgspec.Struct, frozen=True):
    """One image or video to process into `places`, or only to inspect without them; its file or files follow.

    An image has `specs`, its arrays; a video has `video_bytes`, the memory that it may take, and a `video` to process.
    """

    specs: tuple[ArraySpec, ...] = ()
    bounds: PixelBounds | None = None
    video: VideoOrder | None = None
    video_bytes: int = 0
    places: tuple[Extent, ...] = ()


class PictureOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one image or video: its header, its facts, or the filled extents of a video; or an error."""

    header: ImageHeader | None = None
    facts: VideoFacts | None = None
    groups: tuple[Filled, ...] = ()
    message: str = ""
    code: str = ""
    status: int = 0
    refused: bool = False


def carry_out(
    order: PictureOrder,
    encoded: bytes,
    preprocessor: ImageProcessing,
    limits: VideoLimits,
    view: Callable[[Extent], npt.NDArray[np.uint8]],
) -> PictureOutcome:
    """Process or inspect an image or a video; `view` returns the bytes of an extent.

    Raises:
        RequestRefused: If it cannot be served.
        RequestFailed: If the processor's output differs from its plan.
    """
    extents = [*map(view, order.places)]
    if order.video is not None:
        groups = process_video(encoded, order.video, extents, preprocessor, limits)
        return PictureOutcome(groups=groups)
    if order.video_bytes:
        return PictureOutcome(facts=inspect_video(encoded, limits))
    if not extents:
        return PictureOutcome(header=inspect(encoded, limits.pixels))
    process_encoded(encoded, order.specs, extents[0], preprocessor, order.bounds, limits.pixels)
    return PictureOutcome()


class Pictures(ABC):
    """Decoders of untrusted images and videos; called in threads.

    Each method raises `RequestRefused` for content that cannot be served, and `RequestFailed` for other failures.
    """

    @abstractmethod
    def _carry_out(
        self,
        order: PictureOrder,
        encoded: bytes,
        cancellation: CallCancellation | None,
        *,
        keep: bool,
    ) -> PictureOutcome:
        """Carry out an order; with `keep`, in a process for several."""

    def inspect(self, encoded: bytes) -> ImageHeader:
        """Return the header of an image."""
        header = self._carry_out(PictureOrder(), encoded, None, keep=True).header
        assert header is not None
        return header

    def inspect_video(self, encoded: bytes, cancellation: CallCancellation) -> VideoFacts:
        """Return the facts of a video."""
        order = PictureOrder(video_bytes=HEADER_BYTES + 2 * len(encoded))
        facts = self._carry_out(order, encoded, cancellation, keep=False).facts
        assert facts is not None
        return facts

    def fill(
        self, item: MeasuredItem, places: Sequence[Extent], cancellation: CallCancellation
    ) -> tuple[Filled, ...]:
        """Fill the extents of an item that is not embedded; nothing writes to them afterwards.

        Blocks: until all frames are decoded; call it in a thread of the pool.
        """
        assert isinstance(item.content, bytes)
        if item.video is not None:
            order = PictureOrder(
                video_bytes=item.work_bytes, video=item.video, places=tuple(places)
            )
            return self._carry_out(order, item.content, cancellation, keep=False).groups
        order = PictureOrder(item.groups[0].arrays, item.bounds, places=tuple(places))
        self._carry_out(order, item.content, None, keep=item.work_bytes < LARGE_BYTES)
        return (Filled(item.key),)


class LocalPictures(Pictures):
    """Decodes in the calling thread, for preprocessors without an `ImageRecipe` and for simulations."""

    def __init__(
        self,
        preprocessor: Preprocessor,
        limits: VideoLimits,
        view: Callable[[Extent], npt.NDArray[np.uint8]],
    ) -> None:
        self._preprocessor = preprocessor
        self._limits = limits
        self._view = view

    def _carry_out(
        self,
        order: PictureOrder,
        encoded: bytes,
        cancellation: CallCancellation | None,
        *,
        keep: bool,
    ) -> PictureOutcome:
        return carry_out(order, encoded, self._preprocessor, self._limits, self._view)


class PictureProcesses(Pictures):
    """Processes for images and videos; every method may be called from any thread."""

    def __init__(
        self,
        recipe: ImageRecipe,
        limits: VideoLimits,
        *,
        takes_videos: bool,
        arena_fd: int,
        deadline_s: float,
    ) -> None:
        """Start the server that processes are forked from.

        `arena_fd` is the arena, which begins with the pixel region, and `deadline_s` the maximum time of one image.
        """
        self._limits = limits
        self._calls = IsolatedCalls(
            SERVER_MODULE,
            msgspec.json.encode(PictureWork(recipe, limits, takes_videos)),
            name="image",
            failure="the image could not be processed",
            code="image_processing_failed",
            descriptors=(arena_fd,),
        )
        self._deadline_s = deadline_s
        self._calls.start()

    @property
    def pid(self) -> int:
        """The process id of the server; 0 while it is not running."""
        return self._calls.pid

    def inspect(self, encoded: bytes) -> ImageHeader:
        """Return the header of an image; a process is only needed if native code parses it."""
        if has_native_header(encoded):
            return super().inspect(encoded)
        return inspect(encoded, self._limits.pixels)

    def _carry_out(
        self,
        order: PictureOrder,
        encoded: bytes,
        cancellation: CallCancellation | None,
        *,
        keep: bool,
    ) -> PictureOutcome:
        try:
            # No retry for a large image: it may have caused the shortage of memory that its process was killed for.
            outcome = self._calls.call(
                msgspec.json.encode(order),
                encoded,
                answer_type=PictureOutcome,
                deadline_s=self._deadline_s,
                keep=keep,
                retry=keep,
                cancellation=cancellation,
            )
        except CallFailedError as error:
            if cancellation is not None and cancellation.is_cancelled:
                raise RequestFailed("the request was cancelled") from None
            noun = "video" if order.video_bytes else "image"
            logger.error("the process of a %s %s", noun, error)  # noqa: TRY400 - the traceback adds nothing
            raise (
                _video_error(error)
                if order.video_bytes
                else RequestFailed(
                    f"the image could not be processed: its process {error}. "
                    "Remedy: send another encoding of the image, or a smaller one.",
                    code="image_processing_failed",
                )
            ) from None
        if outcome.message:
            kind = RequestRefused if outcome.refused else RequestFailed
            raise kind(outcome.message, code=outcome.code, status=outcome.status)
        return outcome

    def close(self) -> None:
        """End the server and every process that it forked."""
        self._calls.close()


def _video_error(error: CallFailedError) -> RequestRefused | RequestFailed:
    """Error for a video whose process died: the client's, unless it was killed from outside."""
    if error.signal in EXTERNAL_SIGNALS:
        # At the deadline, too: it is within its CPU time, so the cores are busy with other work.
        return RequestFailed(
            f"the video could not be processed: its process {error}. "
            "Remedy: try again later, send fewer frames, or raise media.prepare_s.",
            code="video_processing_failed",
            status=503,
            retry_after_s=RETRY_AFTER_S,
        )
    reason = f"its process {error}"
    if error.signal is signal.SIGPROF:
        reason = "it takes too long; media.video_decode_s is the limit of CPU time"
    return RequestRefused(
        f"the video cannot be decoded: {reason}. "
        "Remedy: send another encoding of the video, or a shorter or smaller one.",
        code="video_invalid",
    )
