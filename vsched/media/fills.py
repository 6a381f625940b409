"""Fills: decoding and processing of images into their arena extents.

Requests with the same image share one fill. A fill reserves memory from the budget, in order of arrival, before its
thread starts. A fill that no request waits for is cancelled. A running thread cannot be cancelled, so memory and extent
are released when it is done, and the pixels are cached; but the process of a video, which may decode for long, is
killed.

A fill waits for the budget while its request holds arena space. The fills that hold the budget have their space already
and wait for nothing, so there is no deadlock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from vsched.errors import RequestFailed, RequestRefused
from vsched.isolated.calls import CallCancellation
from vsched.media.budget import ByteBudget, Grant
from vsched.media.items import Filled, MeasuredItem
from vsched.media.measure import unknown_image
from vsched.media.pictures.filling import fill_embedding
from vsched.media.pictures.processes import Pictures
from vsched.media.pixels import PixelLease, PixelStore
from vsched.media.references import blame
from vsched.probes import fault_point
from vsched.types import Extent
from vsched.worker.contract import VideoPlan

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Fill:
    """An image whose pixels a thread is writing, or will write; `outcome` is None or the error."""

    image: MeasuredItem
    lease: PixelLease
    outcome: asyncio.Future[RequestRefused | RequestFailed | None]
    cancellation: CallCancellation = field(default_factory=CallCancellation)
    grant: Grant | None = None
    work: Future[tuple[Filled, ...]] | None = None
    waiters: int = 0

    @property
    def key(self) -> bytes:
        return self.image.key

    def give_back(self) -> None:
        """Release memory and arena space; `grant` and `work` refer to the fill, a cycle that would keep the file."""
        if self.grant is not None:
            self.grant.release()
        self.grant = self.work = None
        self.lease.release()


class Fills:
    """The fills of all requests.

    Attributes:
        processed: Number of images decoded and processed.
        embedded: Number of images received as embeddings.
        repeated: Number of images that were cached or already being filled.
    """

    def __init__(
        self,
        store: PixelStore,
        pictures: Pictures,
        executors: tuple[Executor, Executor],
        *,
        dtype: str,
        budget_bytes: int,
    ) -> None:
        """Create fills; `executors` are those of images and of videos, and `dtype` that of embeddings."""
        self.processed = 0
        self.embedded = 0
        self.repeated = 0
        self._store = store
        self._pictures = pictures
        self._executor, self._video_executor = executors
        self._dtype = dtype
        self.budget = ByteBudget(budget_bytes)
        self._fills: dict[bytes, _Fill] = {}

    async def fill(self, measured: Sequence[MeasuredItem], lease: PixelLease) -> None:
        """Wait until the pixels of every leased image are in the arena, filling those that are not.

        Blocks: until the budget admits each image and threads have processed it. On cancellation, only running threads
        continue.

        Raises:
            RequestRefused: If an image is damaged; the message has the index of the first one.
            RequestFailed: If the image processor failed.
        """
        joined: list[tuple[int, _Fill]] = []
        seen: set[bytes] = set()
        try:
            for index, image in enumerate(measured):
                if image.key in seen:
                    continue
                seen.add(image.key)
                await self._cancelled(image.key)
                if all(self._store.is_filled(key) for key in image.extents):
                    self.repeated += 1
                    continue
                fill = self._fills.get(image.key)
                if fill is None:
                    if image.content == b"":
                        raise blame(unknown_image(), index)  # its pixels have been evicted
                    fill = self._start_fill(image, lease)
                else:
                    self.repeated += 1
                fill.waiters += 1
                joined.append((index, fill))
            for index, fill in joined:
                outcome = await asyncio.shield(fill.outcome)
                if isinstance(outcome, RequestRefused):
                    raise blame(outcome, index, fill.image.noun)
                if outcome is not None:
                    raise RequestFailed(
                        outcome.message,
                        code=outcome.code,
                        status=outcome.status,
                        retry_after_s=outcome.retry_after_s,
                    )
        finally:
            for _, fill in joined:
                self._leave_fill(fill)

    def _start_fill(self, image: MeasuredItem, lease: PixelLease) -> _Fill:
        loop = asyncio.get_running_loop()
        fill = _Fill(image, self._store.add_holds(*image.extents), loop.create_future())
        self._fills[image.key] = fill
        places = [lease.extents[key] for key in image.extents]
        is_video = isinstance(image.plan, VideoPlan)
        executor = self._video_executor if is_video else self._executor

        def wake(_: Future[tuple[Filled, ...]]) -> None:
            # The loop may be closed if the process exits while a thread is running.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._finish_fill, fill)

        def begin(grant: Grant) -> None:
            fill.grant = grant
            try:
                fill.work = executor.submit(self._process, image, places, fill.cancellation)
            except RuntimeError:
                self._end_fill(fill, stopping())
            else:
                fill.work.add_done_callback(wake)

        fill.grant = self.budget.ask(image.work_bytes, begin)
        return fill

    def _process(
        self, image: MeasuredItem, places: Sequence[Extent], cancellation: CallCancellation
    ) -> tuple[Filled, ...]:
        if image.is_embedded:
            return fill_embedding(image, [*map(self._store.view, places)], self._dtype)
        fault_point("media.decode")
        return self._pictures.fill(image, places, cancellation)

    def _finish_fill(self, fill: _Fill) -> None:
        if self._fills.get(fill.key) is not fill:
            return
        assert fill.work is not None
        if fill.work.cancelled():
            self._end_fill(fill, stopping())
            return
        error = fill.work.exception()
        if error is None:
            self.processed += not fill.image.is_embedded
            self.embedded += fill.image.is_embedded
            for key, filled in zip(fill.image.extents, fill.work.result(), strict=True):
                self._store.mark_filled(key, filled.key, filled.changes)
            self._end_fill(fill, None)
        elif isinstance(error, RequestRefused | RequestFailed):
            # Its traceback, and that of its context, refer to the image that could not be decoded.
            error.__traceback__ = error.__context__ = None
            self._end_fill(fill, error)
        else:
            logger.error("image processing failed", exc_info=error)
            failure = RequestFailed(
                "the image could not be processed", code="image_processing_failed"
            )
            self._end_fill(fill, failure)

    def _end_fill(self, fill: _Fill, outcome: RequestRefused | RequestFailed | None) -> None:
        del self._fills[fill.key]
        fill.give_back()
        fill.outcome.set_result(outcome)

    async def _cancelled(self, key: bytes) -> None:
        """Wait for the end of a cancelled fill, whose process may still write to its extents."""
        while (fill := self._fills.get(key)) is not None and fill.cancellation.is_cancelled:
            await asyncio.shield(fill.outcome)

    def _leave_fill(self, fill: _Fill) -> None:
        fill.waiters -= 1
        if fill.waiters or fill.outcome.done():
            return
        if fill.work and not fill.work.cancel():
            if fill.image.video is not None:
                fill.cancellation.cancel()
            return
        # No request waits for it, and no thread has started.
        del self._fills[fill.key]
        fill.give_back()
        fill.outcome.cancel()


def stopping() -> RequestFailed:
    """Error for a request whose thread pool is closed."""
    return RequestFailed("the server is stopping", code="stopping", status=503)
