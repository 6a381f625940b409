"""First half of a preparation, in a pool thread: bytes, digest and token count of every image, but no pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from vsched.errors import RequestRefused
from vsched.isolated.calls import CallCancellation
from vsched.media.embeddings import check_tokens, read_embedding
from vsched.media.estimate import EMBEDDING_BYTES, preprocess_bytes
from vsched.media.fetch import Reserve, uncounted
from vsched.media.items import ImageName, MeasuredItem, VideoOrder, within
from vsched.media.keys import embedding_key, group_key, item_key, video_key
from vsched.media.pictures.processes import Pictures
from vsched.media.references import ImageReference, MediaReference, as_reference, blame
from vsched.media.sources import read_local
from vsched.media.video import check_duration, decode_bytes, refuse_without_decoder
from vsched.types import ModelInfo
from vsched.worker.contract import (
    ImagePlan,
    ItemPlan,
    Preprocessor,
    VideoFacts,
    VideoPlan,
    extent_bytes,
)

if TYPE_CHECKING:
    from vsched.config.sections import MediaConfig


@dataclass(frozen=True, slots=True)
class RequestFiles:
    """The files of a request, and its effect on their measurement.

    Attributes:
        fetched: Files by URL.
        reserve: Counts the bytes of further files before they are read.
        cancellation: Ends the inspection of videos when the request is cancelled.
    """

    fetched: Mapping[str, bytes]
    cache_salt: str
    reserve: Reserve = uncounted
    cancellation: CallCancellation = field(default_factory=CallCancellation)


@dataclass(frozen=True, slots=True)
class Planned:
    """Remembered facts about an image or a video that was measured before."""

    plan: ItemPlan
    work_bytes: int


def unknown_image() -> RequestRefused:
    """Error for a name without an image, because it was evicted or never sent."""
    return RequestRefused(
        "no image is kept under this uuid: it was never sent with it, or has been dropped to make room. "
        "Remedy: send the image again, with its uuid; arena.pixel_bytes says how much is kept.",
        code="image_unknown",
    )


def refuse_images(info: ModelInfo, images: Sequence[ImageReference] = ()) -> None:
    """Reject a request with images or videos if the model takes none.

    Raises:
        RequestRefused: With status 400.
    """
    if not info.takes_images:
        raise RequestRefused(
            "the model takes no images. Remedy: send text alone, or use a model that takes images.",
            code="images_not_taken",
        )
    if not info.takes_videos and any(as_reference(image).is_video for image in images):
        raise RequestRefused(
            "the model takes no videos; `vsched check` reports why. Remedy: send frames of it as images.",
            code="videos_not_taken",
        )


class Measurer:
    """Measures the images of requests; called from several threads at once.

    `plans` and `names` are only read here; the event loop fills them. `with_changes` as in `VideoOrder`.
    """

    def __init__(
        self,
        preprocessor: Preprocessor,
        settings: MediaConfig,
        plans: Mapping[bytes, Planned],
        names: Mapping[ImageName, bytes],
        pictures: Pictures,
        *,
        with_changes: bool = False,
    ) -> None:
        self._preprocessor = preprocessor
        self._settings = settings
        self._plans = plans
        self._names = names
        self._pictures = pictures
        self._with_changes = with_changes

    def measure(
        self, references: Sequence[MediaReference], files: RequestFiles
    ) -> list[MeasuredItem]:
        """Measure the images of all references, in order.

        Blocks: for base64, hashing and files; call it off the event loop.

        Raises:
            RequestRefused: If one of them cannot be read or accepted; the message has its index.
        """
        seen: dict[MediaReference, MeasuredItem] = {}
        total = 0
        for index, reference in enumerate(references):
            if reference in seen:
                continue
            try:
                seen[reference] = self._measure(reference, files)
                total += seen[reference].received_bytes
                check_total(total, self._settings)
            except RequestRefused as error:
                raise blame(error, index, reference.noun) from None
        return [seen[reference] for reference in references]

    def _measure(self, reference: MediaReference, files: RequestFiles) -> MeasuredItem:
        if reference.is_embedded:
            return self._measure_embedded(reference, files)
        if reference.is_video:
            return self._measure_video(reference, files)
        return self._measure_image(reference, files)

    def _read(self, source: str, reference: MediaReference, files: RequestFiles) -> bytes:
        found = files.fetched.get(source)
        if found is None:
            found = read_local(source, self._settings, files.reserve, reference.kind)
        return found

    def _measure_video(self, video: MediaReference, files: RequestFiles) -> MeasuredItem:
        is_file = isinstance(video.source, str)
        if is_file:
            refuse_without_decoder()
        encoded: list[bytes] = []
        for url in video.sources:
            encoded.append(self._read(url, video, files))
            check_total(sum(map(len, encoded)), self._settings)
        digest, salt = self._preprocessor.settings_digest, files.cache_salt
        key = video_key(
            settings_digest=digest,
            cache_salt=salt,
            options=msgspec.json.encode((video.sampling, is_file)),
            encoded=encoded,
        )
        planned = self._plans.get(key) or self._plan_video(video, encoded, files.cancellation)
        plan = planned.plan
        assert isinstance(plan, VideoPlan)
        for group in plan.groups:
            check_tokens(group.tokens, self._preprocessor.info)
        check_work(planned.work_bytes, self._settings, "video")
        order = VideoOrder(
            plan.frames,
            plan.size,
            tuple(group.arrays for group in plan.groups),
            tuple(group.tokens for group in plan.groups),
            () if is_file else tuple(map(len, encoded)),
            digest,
            salt,
            self._with_changes,
        )
        content = b"".join(encoded)
        extents = {
            group_key(key, index): extent_bytes(group.arrays)
            for index, group in enumerate(plan.groups)
        }
        return MeasuredItem(
            key, plan, content, extents, len(content), planned.work_bytes, video=order
        )

    def _plan_video(
        self, video: MediaReference, content: Sequence[bytes], cancellation: CallCancellation
    ) -> Planned:
        frames_max = self._settings.video_frames_max
        if isinstance(video.source, str):
            [file] = content
            facts = self._pictures.inspect_video(file, cancellation)
            plan = self._preprocessor.plan_video(facts, video.sampling, frames_max=frames_max)
            return Planned(plan, decode_bytes(facts, len(file)) + plan.work_bytes)
        if video.sampling.fps is not None:
            check_duration(len(content) / video.sampling.fps, self._settings.video_seconds_max)
        headers = [self._pictures.inspect(each) for each in content]
        sizes = {(header.width, header.height) for header in headers}
        if len(sizes) > 1:
            raise RequestRefused.of_limit(
                "the frames of the video differ in size",
                value=", ".join(f"{width}x{height}" for width, height in sorted(sizes)[:4]),
                limit="one size",
                remedy="resize the frames to one size, or send them as images",
                code="video_invalid",
            )
        [(width, height)] = sizes
        facts = VideoFacts(width, height, len(headers), video.sampling.fps or 0)
        plan = self._preprocessor.plan_video(
            facts, video.sampling, frames_max=frames_max, sample=False
        )
        storages = [header.storage for header in headers]
        work = max(preprocess_bytes(width, height, each, plan.groups[0]) for each in storages)
        return Planned(plan, work * plan.group_frames + sum(map(len, content)))

    def _measure_image(self, image: MediaReference, files: RequestFiles) -> MeasuredItem:
        front = within(self._preprocessor, image.bounds, self._settings.image_pixels_max)
        digest, salt = front.settings_digest, files.cache_salt
        name = None if image.uuid is None else (salt, image.uuid, digest)
        encoded = b""
        if isinstance(image.source, str):
            encoded = self._read(image.source, image, files)
            key = item_key(settings_digest=digest, cache_salt=salt, encoded=encoded)
            planned = self._plans.get(key) or self._plan(encoded, front)
        else:  # it was sent before; it is checked later whether its pixels are still cached
            key = b"" if name is None else self._names.get(name, b"")
            if key not in self._plans:
                raise unknown_image()
            planned = self._plans[key]
        plan = planned.plan
        assert isinstance(plan, ImagePlan)
        check_tokens(plan.tokens, self._preprocessor.info)
        check_work(planned.work_bytes, self._settings)
        extents = {key: extent_bytes(plan.arrays)}
        return MeasuredItem(
            key, plan, encoded, extents, len(encoded), planned.work_bytes, image.bounds, name
        )

    def _plan(self, encoded: bytes, front: Preprocessor) -> Planned:
        header = self._pictures.inspect(encoded)
        plan = front.plan_image(header.width, header.height)
        work_bytes = preprocess_bytes(header.width, header.height, header.storage, plan)
        return Planned(plan, work_bytes)

    def _measure_embedded(self, reference: MediaReference, files: RequestFiles) -> MeasuredItem:
        assert isinstance(reference.source, str)
        file = self._read(reference.source, reference, files)
        work_bytes = EMBEDDING_BYTES + len(file)
        check_work(work_bytes, self._settings, reference.noun)
        front, info = self._preprocessor, self._preprocessor.info
        embeds, plan = read_embedding(file, front, self._settings, is_video=reference.is_video)
        groups = plan.groups if isinstance(plan, VideoPlan) else (plan,)
        keys, start = [], 0
        for group in groups:
            rows = embeds.rows(start, start + group.tokens)
            start += group.tokens
            keys.append(
                embedding_key(
                    settings_digest=front.settings_digest,
                    cache_salt=files.cache_salt,
                    served=(info.dtype, info.hidden_size, info.embedding_levels),
                    dtype=rows.dtype,
                    shape=rows.shape,
                    # Without the time of a frame group: equal ones of several videos have one key.
                    metadata=b"" if reference.is_video else group.metadata,
                    rows=rows.data,
                )
            )
        key, extent_keys = keys[0], keys
        if reference.is_video:
            key = video_key(
                settings_digest=front.settings_digest,
                cache_salt=files.cache_salt,
                options=b"embeddings",
                encoded=keys,
            )
            extent_keys = [group_key(key, index) for index in range(len(groups))]
        sizes = [group.tokens * info.embedding_row_bytes for group in groups]
        extents = dict(zip(extent_keys, sizes, strict=True))
        return MeasuredItem(
            key, plan, embeds, extents, len(file), work_bytes, content_keys=tuple(keys)
        )


def check_permitted(references: Sequence[MediaReference], settings: MediaConfig) -> None:
    """Reject embeddings if they are disabled, and too many videos or frames.

    Raises:
        RequestRefused: With value, limit and remedy.
    """
    videos = [each for each in references if each.is_video]
    if len(videos) > settings.videos_max:
        raise RequestRefused.of_limit(
            "the request has too many videos",
            value=f"{len(videos)} videos",
            limit=f"{settings.videos_max} videos",
            remedy="send fewer videos or raise media.videos_max",
            code="too_many_videos",
        )
    for video in videos:
        if not 0 < len(video.sources) <= settings.video_frames_max:
            raise RequestRefused.of_limit(
                "a video has too many frames, or none",
                value=f"{len(video.sources)} frames",
                limit=f"1 to {settings.video_frames_max} frames",
                remedy="send that many, or raise media.video_frames_max",
                code="video_frames_exceeded",
            )
    for index, reference in enumerate(references):
        if reference.is_embedded and not settings.allow_embeddings:
            noun = reference.noun
            message = (
                "embeddings in requests are switched off: media.allow_embeddings is false. "
                f"Remedy: send the {noun} itself or set media.allow_embeddings = true."
            )
            raise blame(RequestRefused(message, code="embeddings_disabled"), index, noun)


def check_work(size: int, settings: MediaConfig, noun: str = "image") -> None:
    """Reject an image or a video whose processing needs more memory than the whole budget.

    Raises:
        RequestRefused: With value, limit and remedy.
    """
    if size > settings.decode_bytes:
        raise RequestRefused.of_limit(
            f"the {noun} takes too much memory to decode and process",
            value=f"up to {size} bytes",
            limit=f"{settings.decode_bytes} bytes",
            remedy=f"send a smaller {noun} or raise media.decode_bytes",
            code=f"{noun}_too_large",
            status=413,
        )


def check_total(total: int, settings: MediaConfig) -> None:
    """Reject a request whose images have too many encoded bytes in total.

    Raises:
        RequestRefused: With value, limit and remedy.
    """
    if total > settings.request_bytes_max:
        raise RequestRefused.of_limit(
            "the images of this request are too large in total",
            value=f"{total} bytes",
            limit=f"{settings.request_bytes_max} bytes",
            remedy="send fewer or smaller images or raise media.request_bytes_max",
            code="images_too_large",
            status=413,
        )
