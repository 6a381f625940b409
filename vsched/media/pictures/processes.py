"""The engine's end of picture processes: images are opened, decoded and processed outside the engine.

Decoders are native code that parses client input: in a process, a crash costs one image. Also, Pillow and numpy hold
the GIL for single calls whose time grows with the image, which would block the event loop. The processes write to the
arena. An image that needs `LARGE_BYTES` or more gets its own process, whose end returns the memory to the system;
smaller ones share kept processes. A thread of the pool waits for the process: order, memory budget, and cancellation
are the same with and without processes.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence

import msgspec

from vsched.errors import RequestFailed, RequestRefused
from vsched.isolated.calls import (
    EXTERNAL_SIGNALS,
    RETRY_AFTER_S,
    CallCancellation,
    CallFailedError,
    IsolatedCalls,
)
from vsched.media.decode import DecodeLimits, ImageHeader, has_native_header, inspect
from vsched.media.measure import Filled, MeasuredItem, VideoOrder
from vsched.media.video import HEADER_BYTES, VideoLimits
from vsched.types import ArraySpec, Extent
from vsched.worker.contract import ImageRecipe, PixelBounds, Preprocessor, VideoFacts

logger = logging.getLogger(__name__)

LARGE_BYTES = 64 << 20
"""Memory from which an image gets its own process; a photograph of 12 megapixels needs as much."""
SERVER_MODULE = "vsched.media.pictures.server"


class PictureWork(msgspec.Struct, frozen=True):
    """The setup of the server: the recipe of the image processor, and the limits of decoding.

    `video_limits` is None if the model takes no videos.
    """

    recipe: ImageRecipe
    limits: DecodeLimits
    video_limits: VideoLimits | None = None


class PictureOrder(msgspec.Struct, frozen=True):
    """One image to process, or only to inspect if `place` is None; a frame with its encoded bytes follows.

    With `video_bytes`, the memory that it may take, it is a video: to process according to `video` into `places`, or
    only to inspect.
    """

    specs: tuple[ArraySpec, ...] = ()
    place: Extent | None = None
    bounds: PixelBounds | None = None
    video_bytes: int = 0
    video: VideoOrder | None = None
    places: tuple[Extent, ...] = ()


class PictureOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one image or video.

    The message is empty on success: its arrays are in the arena, with `groups` for those of a video, or `header` or
    `facts` is set.
    """

    header: ImageHeader | None = None
    facts: VideoFacts | None = None
    groups: tuple[Filled, ...] = ()
    message: str = ""
    code: str = ""
    status: int = 0
    refused: bool = False


def picture_processes(
    preprocessor: Preprocessor,
    limits: DecodeLimits,
    video_limits: VideoLimits,
    *,
    arena_fd: int,
    deadline_s: float,
) -> PictureProcesses | None:
    """Start the processes for images; None if the preprocessor has no image recipe.

    `arena_fd` is the arena, which begins with the pixel region, and `deadline_s` the maximum time of one image.
    """
    recipe = preprocessor.image_recipe()
    if recipe is None:
        return None
    videos = video_limits if preprocessor.info.takes_videos else None
    work = msgspec.json.encode(PictureWork(recipe, limits, videos))
    return PictureProcesses(work, limits, arena_fd=arena_fd, deadline_s=deadline_s)


class PictureProcesses:
    """Processes for images; every method may be called from any thread."""

    def __init__(
        self, work: bytes, limits: DecodeLimits, *, arena_fd: int, deadline_s: float
    ) -> None:
        """Start the server that processes are forked from; `work` is a `PictureWork`."""
        self._limits = limits
        self._calls = IsolatedCalls(
            SERVER_MODULE,
            work,
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
        """Like `vsched.media.decode.inspect`, in a process if native code parses the header.

        Raises:
            RequestRefused: When the image cannot be served.
            RequestFailed: When the process died or took too long.
        """
        if not has_native_header(encoded):
            return inspect(encoded, self._limits)
        header = self._call(PictureOrder(), encoded, keep=True).header
        assert header is not None
        return header

    def fill(
        self, item: MeasuredItem, places: Sequence[Extent], cancellation: CallCancellation
    ) -> tuple[Filled, ...]:
        """Fill extents of the arena in a process; nothing writes to them after this has returned or raised.

        Blocks: for the deadline at most; call it in a thread of the pool.

        Raises:
            RequestRefused: When the image or video is damaged.
            RequestFailed: When the processor failed, or the process died or took too long.
        """
        assert isinstance(item.content, bytes)
        if item.video is not None:
            order = PictureOrder(
                video_bytes=item.work_bytes, video=item.video, places=tuple(places)
            )
            return self._call_video(order, item.content, cancellation).groups
        order = PictureOrder(item.groups[0].arrays, places[0], item.bounds)
        self._call(order, item.content, keep=item.work_bytes < LARGE_BYTES)
        return (Filled(item.key),)

    def inspect_video(self, encoded: bytes, cancellation: CallCancellation) -> VideoFacts:
        """Like `vsched.media.video.inspect_video`, in a process of its own.

        Raises:
            RequestRefused: When the video cannot be served.
            RequestFailed: When the process was killed from outside.
        """
        memory = HEADER_BYTES + 2 * len(encoded)
        facts = self._call_video(PictureOrder(video_bytes=memory), encoded, cancellation).facts
        assert facts is not None
        return facts

    def _call_video(
        self, order: PictureOrder, encoded: bytes, cancellation: CallCancellation
    ) -> PictureOutcome:
        """Carry out an order for a video in a new process; if the video kills it, that is the client's error."""
        try:
            outcome = self._calls.call(
                msgspec.json.encode(order),
                encoded,
                answer_type=PictureOutcome,
                deadline_s=self._deadline_s,
                cancellation=cancellation,
            )
        except CallFailedError as error:
            if cancellation.is_cancelled:
                raise RequestFailed("the request was cancelled") from None
            logger.error("the process of a video %s", error)  # noqa: TRY400 - the traceback adds nothing
            if error.signal in EXTERNAL_SIGNALS:
                # At the deadline, too: it is within its CPU time, so the cores are busy with other work.
                raise RequestFailed(
                    f"the video could not be processed: its process {error}. "
                    "Remedy: try again later, send fewer frames, or raise media.prepare_s.",
                    code="video_processing_failed",
                    status=503,
                    retry_after_s=RETRY_AFTER_S,
                ) from None
            reason = f"its process {error}"
            if error.signal is signal.SIGPROF:
                reason = "it takes too long; media.video_decode_s is the limit of CPU time"
            raise RequestRefused(
                f"the video cannot be decoded: {reason}. "
                "Remedy: send another encoding of the video, or a shorter or smaller one.",
                code="video_invalid",
            ) from None
        _raise(outcome)
        return outcome

    def _call(self, order: PictureOrder, encoded: bytes, *, keep: bool) -> PictureOutcome:
        """Carry out an order in a process; return its outcome, or raise its error."""
        try:
            # No retry for a large image: it may have caused the shortage of memory that its process was killed for.
            outcome = self._calls.call(
                msgspec.json.encode(order),
                encoded,
                answer_type=PictureOutcome,
                deadline_s=self._deadline_s,
                keep=keep,
                retry=keep,
            )
        except CallFailedError as error:
            logger.error("the process of an image %s", error)  # noqa: TRY400 - the traceback adds nothing
            raise RequestFailed(
                f"the image could not be processed: its process {error}. "
                "Remedy: send another encoding of the image, or a smaller one.",
                code="image_processing_failed",
            ) from None
        _raise(outcome)
        return outcome

    def close(self) -> None:
        """End the server and every process that it forked."""
        self._calls.close()


def _raise(outcome: PictureOutcome) -> None:
    """Raise the error of an outcome, if it has one."""
    if not outcome.message:
        return
    if outcome.refused:
        raise RequestRefused(outcome.message, code=outcome.code, status=outcome.status)
    raise RequestFailed(outcome.message, code=outcome.code, status=outcome.status)
