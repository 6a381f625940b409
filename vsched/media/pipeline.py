"""Prepare a request: token ids, items, and pixels in the arena.

The order matters. Headers are read and tokens counted before any space is asked for; space is taken in one go before
any pixel is decoded; so what waits holds only the bytes that the client sent, and what decodes has a place to write.

A thread cannot be cancelled. A request that goes away while a thread writes its pixels gives its own hold back at once;
the thread's hold keeps the space until the thread is done, and then the pixels are kept for whoever comes next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec

from vsched.errors import RequestFailed, RequestRefused, limit_message
from vsched.media.embeddings import EmbeddedImage, ImageReference
from vsched.media.measure import (
    Measured,
    Measurer,
    blame,
    check_permitted,
    check_total,
    pixel_limits,
    reference_bytes,
)
from vsched.media.pixels import PixelLease, PixelStatistics, PixelStore
from vsched.media.process import process
from vsched.media.settings import MediaSettings
from vsched.media.sources import is_local, read_remote
from vsched.types import MediaItem
from vsched.worker.contract import ImagePlan, Preprocessor

logger = logging.getLogger(__name__)

_INLINE_CHARACTERS_MAX = 4096
"""A prompt up to this length is tokenized on the loop: a hop to a thread costs more than it."""


class PrepareTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one preparation went; milliseconds.

    `read_ms` covers fetching, base64, digests, headers and tokenizing; `wait_ms` waiting for pixel space; `process_ms`
    decoding and processing what was not there yet.
    """

    read_ms: float = 0.0
    wait_ms: float = 0.0
    process_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """The whole of it."""
        return self.read_ms + self.wait_ms + self.process_ms


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready to submit; `lease` must be released when the request ends, however it ends."""

    token_ids: list[int]
    items: tuple[MediaItem, ...]
    lease: PixelLease
    timings: PrepareTimings


class MediaStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the pipeline.

    `processed` counts images that were decoded and processed, `embedded` those that came as embeddings instead;
    `repeated` counts items that were there or on their way.
    """

    preparing: int
    preparing_bytes: int
    processed: int
    embedded: int
    repeated: int
    refused: int
    pixels: PixelStatistics


@dataclass(slots=True, eq=False)
class _Fill:
    """One item whose pixels a thread is writing, or will be; `outcome` holds None or why it failed."""

    image: Measured
    lease: PixelLease
    outcome: asyncio.Future[RequestRefused | RequestFailed | None]
    work: Future[None] = field(init=False)
    waiters: int = 0

    @property
    def key(self) -> bytes:
        return self.image.key


class MediaPipeline:
    """Turns prompts and image references into token ids and items, within limits, off the event loop."""

    def __init__(
        self, preprocessor: Preprocessor, store: PixelStore, settings: MediaSettings
    ) -> None:
        self._preprocessor = preprocessor
        self._store = store
        self._settings = settings
        self._plans: OrderedDict[bytes, ImagePlan] = OrderedDict()
        self._measurer = Measurer(preprocessor, settings, self._plans)
        self._limits = pixel_limits(settings)
        self._executor = ThreadPoolExecutor(settings.threads, thread_name_prefix="media")
        self._fills: dict[bytes, _Fill] = {}
        self._preparing = 0
        self._preparing_bytes = 0
        self._processed = 0
        self._embedded = 0
        self._repeated = 0
        self._refused = 0

    async def prepare(
        self, prompt: str | list[int], images: Sequence[ImageReference], cache_salt: str = ""
    ) -> Prepared:
        """Return token ids, items and the lease on their pixels.

        Blocks: up to `settings.prepare_s`. Cancelling it leaves nothing behind.

        Raises:
            RequestRefused: When an image or the prompt cannot be accepted, or too many requests are in preparation.
            RequestFailed: When the image processor itself failed.
        """
        size = sum(map(reference_bytes, images))
        try:
            check_permitted(images, self._settings)
            self._check_room(len(images), size)
            self._preparing += 1
            self._preparing_bytes += size
            try:
                async with asyncio.timeout(self._settings.prepare_s):
                    return await self._prepare(prompt, images, cache_salt)
            finally:
                self._preparing -= 1
                self._preparing_bytes -= size
        except TimeoutError:
            self._refused += 1
            raise self._too_slow() from None
        except RequestRefused:
            self._refused += 1
            raise

    def statistics(self) -> MediaStatistics:
        """Return a snapshot."""
        return MediaStatistics(
            preparing=self._preparing,
            preparing_bytes=self._preparing_bytes,
            processed=self._processed,
            embedded=self._embedded,
            repeated=self._repeated,
            refused=self._refused,
            pixels=self._store.statistics(),
        )

    def clear(self) -> int:
        """Forget remembered plans and pixels that no request holds; return the bytes freed."""
        self._plans.clear()
        return self._store.clear()

    def close(self) -> None:
        """Stop the pool.

        Blocks: until the images being processed are done; those that wait are given up.
        """
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _check_room(self, images: int, size: int) -> None:
        settings = self._settings
        if images > settings.images_max:
            message = limit_message(
                "the request has too many images",
                value=f"{images} images",
                limit=f"{settings.images_max} images",
                remedy="send fewer images or raise media.images_max",
            )
            raise RequestRefused(message, code="too_many_images")
        if self._preparing >= settings.preparing_max:
            message = limit_message(
                "too many requests are being prepared",
                value=f"{self._preparing} requests",
                limit=f"{settings.preparing_max} requests",
                remedy="try again later or raise media.preparing_max",
            )
            raise RequestRefused(message, code="queue_full", status=429, retry_after_s=1)
        if self._preparing and self._preparing_bytes + size > settings.preparing_bytes_max:
            message = limit_message(
                "the requests being prepared hold too many bytes",
                value=f"{self._preparing_bytes + size} bytes",
                limit=f"{settings.preparing_bytes_max} bytes",
                remedy="try again later or raise media.preparing_bytes_max",
            )
            raise RequestRefused(message, code="queue_full", status=429, retry_after_s=1)

    def _too_slow(self) -> RequestRefused:
        limit = f"{self._settings.prepare_s:g} s"
        message = limit_message(
            "the request could not be prepared in time",
            value=f"over {limit}",
            limit=limit,
            remedy="try again later, send fewer images, or raise media.prepare_s",
        )
        return RequestRefused(message, code="prepare_timeout", status=503, retry_after_s=5)

    async def _prepare(
        self, prompt: str | list[int], images: Sequence[ImageReference], cache_salt: str
    ) -> Prepared:
        started = time.perf_counter()
        prompt_ids, measured = await self._read(prompt, images, cache_salt)
        token_ids, offsets = self._preprocessor.expand(
            prompt_ids, [image.plan.tokens for image in measured]
        )
        self._check_context(len(token_ids))
        read = time.perf_counter()
        lease = await self._store.acquire({image.key: image.extent_bytes for image in measured})
        acquired = time.perf_counter()
        try:
            await self._fill(measured, lease)
        except BaseException:
            lease.release()
            raise
        items = tuple(
            MediaItem(
                key=image.key,
                tokens=image.plan.tokens,
                offset=offset,
                grid=image.plan.grid,
                pixels=lease.extents[image.key],
                encoded=image.is_embedded,
            )
            for image, offset in zip(measured, offsets, strict=True)
        )
        timings = PrepareTimings(
            read_ms=(read - started) * 1e3,
            wait_ms=(acquired - read) * 1e3,
            process_ms=(time.perf_counter() - acquired) * 1e3,
        )
        return Prepared(token_ids, items, lease, timings)

    async def _read(
        self, prompt: str | list[int], images: Sequence[ImageReference], cache_salt: str
    ) -> tuple[list[int], list[Measured]]:
        if not images and (isinstance(prompt, list) or len(prompt) <= _INLINE_CHARACTERS_MAX):
            return self._tokenize(prompt), []
        fetched = await self._fetch(images)

        def read() -> tuple[list[int], list[Measured]]:
            # Images first: a request that is refused for an image need not be tokenized.
            measured = self._measurer.measure(images, fetched, cache_salt)
            return self._tokenize(prompt), measured

        return await asyncio.get_running_loop().run_in_executor(self._executor, read)

    def _tokenize(self, prompt: str | list[int]) -> list[int]:
        return self._preprocessor.tokenize(prompt) if isinstance(prompt, str) else prompt

    async def _fetch(self, images: Sequence[ImageReference]) -> dict[str, bytes]:
        # One after the other, so that at most one image beyond the request's bound is ever in memory.
        fetched: dict[str, bytes] = {}
        total = 0
        for index, reference in enumerate(images):
            if isinstance(reference, EmbeddedImage) or is_local(reference) or reference in fetched:
                continue
            try:
                fetched[reference] = await read_remote(reference, self._settings)
                total += len(fetched[reference])
                check_total(total, self._settings)
            except RequestRefused as error:
                raise blame(error, index) from None
        return fetched

    def _check_context(self, tokens: int) -> None:
        # Here, before pixels are decoded for a request that cannot run.
        limit = self._preprocessor.info.context_tokens
        if tokens >= limit:
            message = limit_message(
                "the prompt leaves no room for an answer",
                value=f"{tokens} prompt tokens",
                limit=f"{limit} tokens of context",
                remedy="shorten the prompt or send fewer or smaller images",
            )
            raise RequestRefused(message, code="context_exceeded")

    async def _fill(self, measured: Sequence[Measured], lease: PixelLease) -> None:
        """See to it that the pixels of every leased item are there."""
        joined: list[tuple[int, _Fill]] = []
        seen: set[bytes] = set()
        try:
            for index, image in enumerate(measured):
                if image.key in seen:
                    continue
                seen.add(image.key)
                if not image.is_embedded:
                    self._remember(image.key, image.plan)
                if self._store.is_filled(image.key):
                    self._repeated += 1
                    continue
                fill = self._fills.get(image.key)
                if fill is None:
                    fill = self._start(image, lease)
                else:
                    self._repeated += 1
                fill.waiters += 1
                joined.append((index, fill))
            for index, fill in joined:
                outcome = await asyncio.shield(fill.outcome)
                if isinstance(outcome, RequestRefused):
                    raise blame(outcome, index)
                if outcome is not None:
                    raise RequestFailed(outcome.message, code=outcome.code, status=outcome.status)
        finally:
            for _, fill in joined:
                self._leave(fill)

    def _start(self, image: Measured, lease: PixelLease) -> _Fill:
        loop = asyncio.get_running_loop()
        fill = _Fill(image, self._store.hold(image.key), loop.create_future())
        extent = self._store.view_bytes(lease.extents[image.key])
        try:
            fill.work = self._executor.submit(
                process, image, extent, self._preprocessor, self._limits
            )
        except RuntimeError:
            fill.lease.release()
            raise _stopping() from None
        self._fills[image.key] = fill

        def wake(_: Future[None]) -> None:
            # The loop may be gone when the process ends while a thread is still at work.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._finish, fill)

        fill.work.add_done_callback(wake)
        return fill

    def _finish(self, fill: _Fill) -> None:
        if self._fills.get(fill.key) is not fill:
            return
        del self._fills[fill.key]
        outcome: RequestRefused | RequestFailed | None
        if fill.work.cancelled():
            outcome = _stopping()
        else:
            error = fill.work.exception()
            if error is None:
                self._processed += not fill.image.is_embedded
                self._embedded += fill.image.is_embedded
                self._store.mark_filled(fill.key)
                outcome = None
            elif isinstance(error, RequestRefused | RequestFailed):
                outcome = error
            else:
                logger.error("image processing failed", exc_info=error)
                outcome = RequestFailed(
                    "the image could not be processed", code="image_processing_failed"
                )
        fill.lease.release()
        fill.outcome.set_result(outcome)

    def _leave(self, fill: _Fill) -> None:
        fill.waiters -= 1
        if fill.waiters == 0 and not fill.outcome.done() and fill.work.cancel():
            # Nobody wants it any more and no thread has begun.
            if self._fills.get(fill.key) is fill:
                del self._fills[fill.key]
            fill.lease.release()
            fill.outcome.cancel()

    def _remember(self, key: bytes, plan: ImagePlan) -> None:
        self._plans[key] = plan
        self._plans.move_to_end(key)
        while len(self._plans) > self._settings.plans_max:
            self._plans.popitem(last=False)


def _stopping() -> RequestFailed:
    return RequestFailed("the server is stopping", code="stopping", status=503)
