"""Prepare a request: token ids, images, and pixels in the arena.

The order matters. Headers are read and tokens counted before arena space is requested; space for all images is acquired
at once before pixels are decoded; then memory for decoding is reserved image by image, from a budget. So waiting
requests hold only the bytes that the client sent, and decoding never waits for arena space.

A thread cannot be cancelled. A request that is cancelled while a thread writes its pixels releases its own hold at
once; the thread's hold keeps the space until the thread is done, and then the pixels stay cached.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from vsched.errors import RequestRefused, limit_message
from vsched.media.budget import BudgetStatistics, HeldBytes, Holding
from vsched.media.fetch import fetch
from vsched.media.fills import Fills, stopping
from vsched.media.items import ImageName, MeasuredItem
from vsched.media.measure import (
    Measurer,
    Planned,
    RequestFiles,
    check_permitted,
    check_total,
    refuse_images,
)
from vsched.media.pictures.processes import LocalPictures, PictureProcesses
from vsched.media.pixels import PixelLease, PixelStatistics, PixelStore
from vsched.media.pruning import Pruning
from vsched.media.references import (
    ImageReference,
    MediaReference,
    as_reference,
    blame,
    check_attention,
    place_attention,
)
from vsched.media.sources import ReadRemote, is_local
from vsched.media.video import VideoLimits
from vsched.types import MediaItem, Spans
from vsched.worker.contract import Preprocessor, VideoPlan

if TYPE_CHECKING:
    from vsched.config.sections import MediaConfig

PLANS_MAX = 8192
"""Number of images whose plan is remembered, and of remembered names."""
_INLINE_CHARACTERS_MAX = 4096
"""Prompts up to this length are tokenized on the event loop: a switch to a thread takes longer."""


Prompt = str | list[int] | Callable[[], str]
"""A text, its tokens, or a function that renders the text; that runs in a thread, and may take long."""

_LONG_TEXTS_NICE = 5
"""Niceness of the thread for long texts, so that it yields to the event loop on busy cores."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that is ready to submit; release `lease` when the request ends, in any case."""

    token_ids: list[int]
    items: tuple[MediaItem, ...]
    lease: PixelLease


class MediaStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the pipeline.

    `processed` counts images that were decoded and processed, `embedded` images received as embeddings; `repeated`
    counts images that were cached or already being filled. `preparing_bytes` is the memory of references and of data
    read for them; `decode` is the memory budget of decoding and processing.
    """

    preparing: int
    preparing_bytes: int
    processed: int
    embedded: int
    repeated: int
    refused: int
    decode: BudgetStatistics
    pixels: PixelStatistics


class MediaPipeline:
    """Converts prompts and image references to token ids and images, within limits, off the event loop.

    Attributes:
        pruning: The seat of the pruning policy; None if nothing is pruned.
    """

    def __init__(
        self,
        preprocessor: Preprocessor,
        store: PixelStore,
        settings: MediaConfig,
        pruning: Pruning | None = None,
        *,
        executor: Executor | None = None,
        read_remote: ReadRemote = fetch,
    ) -> None:
        """Create the pipeline, which owns the executor: by default `settings.threads` and one thread for long texts.

        A text that fills the context takes a core for a second. With two at a time on two cores, the event loop waited
        for a core longer than it ran; so they are tokenized one at a time, at a lower priority.

        Images are decoded in isolated processes if no `executor` is passed and other processes can map the store.

        Raises:
            ConfigError: If videos are to be pruned, and the model does not support it.
        """
        self.pruning = pruning
        if pruning is not None:
            pruning.check_model(preprocessor)
        self._read_remote = read_remote
        self._preprocessor = preprocessor
        self._store = store
        self._settings = settings
        self._plans: OrderedDict[bytes, Planned] = OrderedDict()
        self._names: OrderedDict[ImageName, bytes] = OrderedDict()
        self._processes: PictureProcesses | None = None
        limits = VideoLimits(
            settings.image_pixels_max, settings.video_seconds_max, settings.video_decode_s
        )
        recipe = preprocessor.image_recipe()
        if executor is None and store.shared_fd is not None and recipe is not None:
            self._processes = PictureProcesses(
                recipe,
                limits,
                takes_videos=preprocessor.info.takes_videos,
                arena_fd=store.shared_fd,
                deadline_s=settings.prepare_s,
            )
        pictures = self._processes or LocalPictures(preprocessor, limits, store.view)
        with_changes = pruning is not None
        self._measurer = Measurer(
            preprocessor, settings, self._plans, self._names, pictures, with_changes=with_changes
        )
        self._executor = executor or ThreadPoolExecutor(
            settings.threads, thread_name_prefix="media"
        )
        self._long_texts = executor or ThreadPoolExecutor(
            1, thread_name_prefix="long-texts", initializer=_give_way
        )
        # Videos take longer, and must not hold up images.
        self._videos = executor or ThreadPoolExecutor(settings.threads, thread_name_prefix="videos")
        self._fills = Fills(
            store,
            pictures,
            (self._executor, self._videos),
            dtype=preprocessor.info.dtype,
            budget_bytes=settings.decode_bytes,
        )
        self._held = HeldBytes(settings.preparing_bytes_max)
        self._preparing = 0
        self._refused = 0

    async def prepare(
        self, prompt: Prompt, images: Sequence[ImageReference], cache_salt: str = ""
    ) -> PreparedRequest:
        """Prepare token ids, images and the lease on their pixels.

        Blocks: up to `settings.prepare_s`. On cancellation, everything is released.

        Raises:
            RequestRefused: If an image or the prompt cannot be accepted, or too many requests are in preparation.
            RequestFailed: If the image processor failed.
        """
        info = self._preprocessor.info
        try:
            references = [as_reference(image) for image in images]
            for index, reference in enumerate(references):
                try:
                    check_attention(reference, info)
                except RequestRefused as error:
                    raise blame(error, index, reference.noun) from None
            check_permitted(references, self._settings)
            with self.hold_place(len(images)):
                if images:
                    refuse_images(info, references)
                holding = Holding(self._held)
                try:
                    holding.add(sum(reference.held_bytes for reference in references))
                    async with asyncio.timeout(self._settings.prepare_s):
                        return await self._prepare(prompt, references, cache_salt, holding)
                finally:
                    holding.remove_owner()
        except TimeoutError:
            self._refused += 1
            raise self._too_slow() from None
        except RequestRefused:
            self._refused += 1
            raise

    async def tokenize(self, prompt: Prompt, *, images: bool) -> list[int]:
        """Tokenize a prompt for a later `prepare`, in this process or another.

        Blocks: up to `settings.prepare_s`.

        Raises:
            RequestRefused: If the chat template or the tokenizer rejects it.
        """
        if _is_short(prompt):
            return self._tokenize(prompt, images=images)
        try:
            async with asyncio.timeout(self._settings.prepare_s):
                reading = self._long_texts.submit(self._tokenize, prompt, images=images)
                return await asyncio.wrap_future(reading)
        except TimeoutError:
            raise self._too_slow() from None

    @contextlib.contextmanager
    def hold_place(self, images: int) -> Iterator[None]:
        """Count a request with this number of images as in preparation, even if another process prepares it.

        Raises:
            RequestRefused: If there are too many images or requests.
        """
        self._check_room(images)
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1

    @property
    def server_pid(self) -> int:
        """The process id of the image server; 0 if there is none."""
        return 0 if self._processes is None else self._processes.pid

    def statistics(self) -> MediaStatistics:
        """Return a snapshot."""
        return MediaStatistics(
            preparing=self._preparing,
            preparing_bytes=self._held.total,
            processed=self._fills.processed,
            embedded=self._fills.embedded,
            repeated=self._fills.repeated,
            refused=self._refused,
            decode=self._fills.budget.statistics(),
            pixels=self._store.statistics(),
        )

    def clear(self) -> int:
        """Clear remembered plans and unused pixels; return the bytes freed."""
        self._plans.clear()
        self._names.clear()
        return self._store.clear()

    def close(self) -> None:
        """Stop the processes and threads; images in them end with an error, waiting ones are cancelled.

        Blocks: until running threads are done.
        """
        if self._processes is not None:
            self._processes.close()  # first, because threads wait for them
        self._long_texts.shutdown(wait=True, cancel_futures=True)
        self._videos.shutdown(wait=True, cancel_futures=True)
        self._executor.shutdown(wait=True, cancel_futures=True)
        if self.pruning is not None:
            self.pruning.close()

    def _check_room(self, images: int) -> None:
        settings = self._settings
        if images:
            refuse_images(self._preprocessor.info)
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
        self,
        prompt: Prompt,
        images: Sequence[MediaReference],
        cache_salt: str,
        holding: Holding,
    ) -> PreparedRequest:
        prompt_ids, measured = await self._read(prompt, images, cache_salt, holding)
        token_ids, spans = self._preprocessor.expand(prompt_ids, [image.plan for image in measured])
        self._check_context(len(token_ids) - self._tokens_saved(measured))
        sizes: dict[bytes, int] = {}
        for image in measured:
            sizes |= image.extents
        lease = await self._store.acquire(sizes)
        try:
            self._remember(measured)
            await self._fills.fill(measured, lease)
            contents: dict[bytes, bytes] = {}
            if any(isinstance(image.plan, VideoPlan) for image in measured):
                if self.pruning is not None:
                    measured = await self._prune(measured, self.pruning)
                    plans = [image.plan for image in measured]
                    token_ids, spans = self._preprocessor.expand(prompt_ids, plans)
                contents, lease = self._store.settle_lease(lease, _left_out(measured))
            items = _items(images, measured, spans, contents, lease)
        except BaseException:
            lease.release()
            raise
        return PreparedRequest(token_ids, items, lease)

    def _tokens_saved(self, measured: Sequence[MeasuredItem]) -> int:
        """Return the number of tokens of videos that will be pruned at least."""
        if self.pruning is None:
            return 0
        plans = [image.plan for image in measured if image.video is not None]
        return sum(self.pruning.tokens_saved(plan) for plan in plans if isinstance(plan, VideoPlan))

    async def _prune(
        self, measured: Sequence[MeasuredItem], pruning: Pruning
    ) -> list[MeasuredItem]:
        """Return the images and videos, with pruned plans of the videos."""
        placeholder = self._preprocessor.info.video_token_id
        assert placeholder is not None
        found = list(measured)
        for index, image in enumerate(measured):
            if image.video is not None and isinstance(image.plan, VideoPlan):
                changes = [self._store.changes(key) for key in image.extents]
                plan = await pruning.prune(image.plan, changes, placeholder)
                found[index] = replace(image, plan=plan)
        return found

    async def _read(
        self,
        prompt: Prompt,
        images: Sequence[MediaReference],
        cache_salt: str,
        holding: Holding,
    ) -> tuple[list[int], list[MeasuredItem]]:
        if not images and _is_short(prompt):
            return self._tokenize(prompt, images=False), []
        fetched = await self._fetch(images, holding)
        executor = self._executor if _is_short(prompt) else self._long_texts
        if any(image.is_video for image in images):
            executor = self._videos

        files = RequestFiles(fetched, cache_salt, holding.add)

        def read() -> tuple[list[int], list[MeasuredItem]]:
            # Images first: a request that is refused because of an image need not be tokenized.
            measured = self._measurer.measure(images, files)
            return self._tokenize(prompt, images=bool(images)), measured

        holding.add_owner()
        try:
            reading = executor.submit(read)
        except RuntimeError:
            holding.remove_owner()
            raise stopping() from None
        reading.add_done_callback(lambda _: holding.remove_owner())
        try:
            return await asyncio.wrap_future(reading)
        except asyncio.CancelledError:
            files.cancellation.cancel()
            raise
        finally:
            del reading  # its error refers to this frame: a cycle that would keep the images

    def _tokenize(self, prompt: Prompt, *, images: bool) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        text = prompt if isinstance(prompt, str) else prompt()
        return self._preprocessor.tokenize(text, images=images)

    async def _fetch(self, images: Sequence[MediaReference], holding: Holding) -> dict[str, bytes]:
        # One after the other, so that at most one image above the request's limit is ever in memory.
        fetched: dict[str, bytes] = {}
        total = 0
        for index, reference in enumerate(images):
            for url in reference.sources:
                if is_local(url) or url in fetched:
                    continue
                try:
                    fetched[url] = await self._read_remote(
                        url, self._settings, holding.add, reference.kind
                    )
                    total += len(fetched[url])
                    check_total(total, self._settings)
                except RequestRefused as error:
                    raise blame(error, index, reference.noun) from None
        return fetched

    def _check_context(self, tokens: int) -> None:
        # Checked here, before pixels are decoded for a request that cannot run.
        limit = self._preprocessor.info.context_tokens
        if tokens >= limit:
            message = limit_message(
                "the prompt leaves no room for an answer",
                value=f"{tokens} prompt tokens",
                limit=f"{limit} tokens of context",
                remedy="shorten the prompt or send fewer or smaller images, or fewer frames of a video",
            )
            raise RequestRefused(message, code="context_exceeded")

    def _remember(self, measured: Sequence[MeasuredItem]) -> None:
        for image in measured:
            if not image.is_embedded:
                self._plans[image.key] = Planned(image.plan, image.work_bytes)
                self._plans.move_to_end(image.key)
            if image.name is not None:
                self._names[image.name] = image.key
                self._names.move_to_end(image.name)
        for remembered in (self._plans, self._names):
            while len(remembered) > PLANS_MAX:
                remembered.popitem(last=False)


def _left_out(measured: Sequence[MeasuredItem]) -> set[bytes]:
    """Return the keys of the extents whose frame groups have no placeholders."""
    return {
        key
        for image in measured
        for key, group in zip(image.extents, image.groups, strict=True)
        if not group.placeholders
    }


def _items(
    images: Sequence[MediaReference],
    measured: Sequence[MeasuredItem],
    spans: Sequence[Spans],
    contents: Mapping[bytes, bytes],
    lease: PixelLease,
) -> tuple[MediaItem, ...]:
    """Return the items of all images and frame groups.

    `spans` are their placeholders; `contents` has the key of each extent's content.

    Raises:
        RequestRefused: If an attention span is out of bounds.
    """
    items: list[MediaItem] = []
    places = iter(spans)
    for index, (reference, image) in enumerate(zip(images, measured, strict=True)):
        for extent, plan in zip(image.extents, image.groups, strict=True):
            if not plan.placeholders:
                continue
            key = contents.get(extent, extent)
            runs = next(places)
            attention = reference.attention
            if attention is not None:
                try:
                    attention = place_attention(attention, runs)
                except RequestRefused as error:
                    raise blame(error, index) from None
            items.append(
                MediaItem(
                    key=key,
                    tokens=plan.tokens,
                    offset=runs[0][0],
                    spans=runs if len(runs) > 1 or plan.kept else (),
                    kept=plan.kept or (),
                    arrays=() if image.is_embedded else plan.arrays,
                    metadata=plan.metadata,
                    extent=lease.extents[key],
                    encoded=image.is_embedded,
                    attention=attention,
                )
            )
    return tuple(items)


def _is_short(prompt: Prompt) -> bool:
    """True for token ids, and for texts that are tokenized at once."""
    is_list = isinstance(prompt, list)
    return is_list or (isinstance(prompt, str) and len(prompt) <= _INLINE_CHARACTERS_MAX)


def _give_way() -> None:
    """Lower the priority of this thread, on systems with thread priorities."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        own = os.getpriority(os.PRIO_PROCESS, thread)  # of a server that is niced, too
        os.setpriority(os.PRIO_PROCESS, thread, own + _LONG_TEXTS_NICE)
