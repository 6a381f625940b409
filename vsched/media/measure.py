"""First half of a preparation, in a pool thread: bytes, digest and token count of every image, but no pixels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from vsched.errors import RequestRefused, limit_message
from vsched.media.base64_text import base64_bytes
from vsched.media.decode import DecodeLimits, ImageHeader, inspect
from vsched.media.embeddings import (
    BoundedImage,
    EmbeddedImage,
    EmbeddedVideo,
    ImageReference,
    NamedImage,
    SpannedImage,
    Tensor,
    UnspannedReference,
    VideoReference,
    check_tokens,
    read_embedding,
    read_video_embedding,
)
from vsched.media.estimate import EMBEDDING_BYTES, preprocess_bytes
from vsched.media.formats import IMAGE, IMAGE_EMBEDDING, VIDEO, VIDEO_EMBEDDING, MediaKind
from vsched.media.keys import embedding_key, group_key, item_key, video_key
from vsched.media.sources import is_data, read_embedded, read_local, scheme_of
from vsched.media.video import VideoLimits, decode_bytes, inspect_video, refuse_without_decoder
from vsched.types import ModelInfo
from vsched.worker.contract import (
    ImagePlan,
    ImageProcessing,
    ItemPlan,
    PixelBounds,
    Preprocessor,
    VideoFacts,
    VideoPlan,
    extent_bytes,
)

if TYPE_CHECKING:
    from vsched.config.sections import MediaConfig

ImageName = tuple[str, str, bytes]
"""Cache salt of the requests, client-defined uuid of the image, and digest of the processor settings."""


@dataclass(frozen=True, slots=True)
class MeasuredImage:
    """One image of a request before its pixels are decoded.

    Attributes:
        content: The encoded image, or the rows of an embedding; empty for a reference by name.
        received_bytes: Bytes that the client sent for it.
        extent_bytes: Bytes that it takes in the arena's pixel region.
        work_bytes: Maximum host memory of a thread that fills its extent.
        bounds: Pixel bounds for resizing; None for the checkpoint's.
        name: Name under which it is remembered, if the client gave one.
    """

    key: bytes
    plan: ImagePlan
    content: bytes | Tensor
    received_bytes: int
    extent_bytes: int
    work_bytes: int
    bounds: PixelBounds | None = None
    name: ImageName | None = None

    @property
    def extents(self) -> dict[bytes, int]:
        """The bytes of its extent, by key."""
        return {self.key: self.extent_bytes}

    @property
    def is_embedded(self) -> bool:
        """True if the client sent an embedding."""
        return isinstance(self.content, Tensor)

    @property
    def is_sent(self) -> bool:
        """True if the client sent it with this request, and not only its name."""
        return bool(self.content)


@dataclass(frozen=True, slots=True)
class MeasuredVideo:
    """One video of a request before its frames are decoded; other attributes as in `MeasuredImage`.

    Attributes:
        content: The file, or the files of its frames.
        is_file: True for a file.
        settings_digest: Digest of the settings that arrays depend on, for the keys of their content.
    """

    key: bytes
    plan: VideoPlan
    content: tuple[bytes, ...]
    is_file: bool
    work_bytes: int
    settings_digest: bytes
    cache_salt: str
    name: None = None
    is_embedded: bool = False
    is_sent: bool = True

    @property
    def received_bytes(self) -> int:
        """Bytes that the client sent for it."""
        return sum(map(len, self.content))

    @property
    def extents(self) -> dict[bytes, int]:
        """The bytes of each frame group's extent, by key."""
        groups = enumerate(self.plan.groups)
        return {group_key(self.key, index): extent_bytes(one.arrays) for index, one in groups}


@dataclass(frozen=True, slots=True)
class MeasuredVideoEmbedding:
    """The embeddings of one video of a request; other attributes as in `MeasuredImage`.

    Attributes:
        content: The rows of all frame groups.
        group_keys: The key of each group's content.
        row_bytes: Bytes of a row in the arena.
    """

    key: bytes
    plan: VideoPlan
    content: Tensor
    group_keys: tuple[bytes, ...]
    received_bytes: int
    row_bytes: int
    work_bytes: int
    name: None = None
    is_embedded: bool = True
    is_sent: bool = True

    @property
    def extents(self) -> dict[bytes, int]:
        """The bytes of each frame group's extent, by key."""
        groups = enumerate(self.plan.groups)
        return {group_key(self.key, index): one.tokens * self.row_bytes for index, one in groups}


MeasuredItem = MeasuredImage | MeasuredVideo | MeasuredVideoEmbedding


@dataclass(frozen=True, slots=True)
class Planned:
    """Remembered facts about an image or a video that was measured before."""

    plan: ItemPlan
    work_bytes: int


def is_video(reference: ImageReference) -> bool:
    """True for a video, given as frames or embeddings."""
    if isinstance(reference, SpannedImage):
        reference = reference.image
    return isinstance(reference, VideoReference | EmbeddedVideo)


def kind_of(reference: UnspannedReference) -> MediaKind:
    """The kind of the files of a reference."""
    match reference:
        case VideoReference(source=str()):
            return VIDEO
        case EmbeddedImage():
            return IMAGE_EMBEDDING
        case EmbeddedVideo():
            return VIDEO_EMBEDDING
    return IMAGE


def source_of(reference: str | NamedImage | BoundedImage) -> str | NamedImage:
    """Data source of a reference; the image itself if it is only a name."""
    image = image_of(reference)
    if isinstance(image, NamedImage) and image.reference is not None:
        return image.reference
    return image


def urls_of(reference: UnspannedReference) -> tuple[str, ...]:
    """All URLs of a reference."""
    if isinstance(reference, VideoReference):
        return reference.urls
    if isinstance(reference, EmbeddedImage | EmbeddedVideo):
        return (reference.source,) if scheme_of(reference.source) else ()
    source = source_of(reference)
    return (source,) if isinstance(source, str) else ()


def image_of(reference: str | NamedImage | BoundedImage) -> str | NamedImage:
    """Image of a reference, without its bounds."""
    return reference.image if isinstance(reference, BoundedImage) else reference


Images = TypeVar("Images", bound=ImageProcessing)


def within(preprocessor: Images, bounds: PixelBounds | None, pixels_max: int) -> Images:
    """Restrict a preprocessor to pixel bounds; None means the checkpoint's.

    Raises:
        RequestRefused: If the model does not support pixel bounds, or not these.
    """
    if bounds is None:
        return preprocessor
    return preprocessor.bounded(bounds, pixels_max=pixels_max)


def unknown_image() -> RequestRefused:
    """Error for a name without an image, because it was evicted or never sent."""
    return RequestRefused(
        "no image is kept under this uuid: it was never sent with it, or has been dropped to make room. "
        "Remedy: send the image again, with its uuid; arena.pixel_bytes says how much is kept.",
        code="image_unknown",
    )


def refuse_images(info: ModelInfo, references: Sequence[ImageReference] = ()) -> None:
    """Reject a request with images or videos if the model takes none.

    Raises:
        RequestRefused: With status 400.
    """
    if any(map(is_video, references)) and info.takes_images and not info.takes_videos:
        raise RequestRefused(
            "the model takes no videos; `vsched check` reports why. Remedy: send frames of it as images.",
            code="videos_not_taken",
        )
    if not info.takes_images:
        raise RequestRefused(
            "the model takes no images. Remedy: send text alone, or ask a model that sees.",
            code="images_not_taken",
        )


def blame(error: RequestRefused, index: int, noun: str = "image") -> RequestRefused:
    """Add the index of the image or video, among all of the request, to an error."""
    return RequestRefused(
        f"{noun} {index}: {error.message}",
        code=error.code,
        status=error.status,
        retry_after_s=error.retry_after_s,
    )


def pixel_limits(settings: MediaConfig) -> DecodeLimits:
    """The decoder's limits from the settings."""
    return DecodeLimits(image=settings.image_pixels_max, webp=settings.webp_pixels_max)


def video_limits(settings: MediaConfig) -> VideoLimits:
    """The limits of videos from the settings."""
    return VideoLimits(
        settings.image_pixels_max, settings.video_seconds_max, settings.video_decode_s
    )


class Measurer:
    """Measures the images of requests; called from several threads at once.

    `plans` and `names` are only read here; the event loop fills them. `inspect_isolated` reads image headers in an
    isolated process, and `inspect_video_isolated` those of videos; by default they are read in the calling thread.
    """

    def __init__(
        self,
        preprocessor: Preprocessor,
        settings: MediaConfig,
        plans: Mapping[bytes, Planned],
        names: Mapping[ImageName, bytes],
        inspect_isolated: Callable[[bytes], ImageHeader] | None = None,
        inspect_video_isolated: Callable[[bytes], VideoFacts] | None = None,
    ) -> None:
        self._preprocessor = preprocessor
        self._settings = settings
        self._plans = plans
        self._names = names
        limits = pixel_limits(settings)
        self._inspect = inspect_isolated or (lambda encoded: inspect(encoded, limits))
        self._inspect_video = inspect_video_isolated or (
            lambda encoded: inspect_video(encoded, video_limits(settings))
        )

    def measure(
        self,
        references: Sequence[UnspannedReference],
        fetched: Mapping[str, bytes],
        cache_salt: str,
        reserve: Callable[[int], None],
    ) -> list[MeasuredItem]:
        """Measure the images of all references, in order; `reserve` counts the bytes of files before they are read.

        Blocks: for base64, hashing and files; call it off the event loop.

        Raises:
            RequestRefused: If one of them cannot be read or accepted; the message has its index.
        """
        seen: dict[UnspannedReference, MeasuredItem] = {}
        total = 0
        result: list[MeasuredItem] = []
        for index, reference in enumerate(references):
            measured = seen.get(reference)
            if measured is None:
                try:
                    measured = self._measure(reference, fetched, cache_salt, reserve)
                    total += measured.received_bytes
                    check_total(total, self._settings)
                except RequestRefused as error:
                    raise blame(error, index, noun_of(reference)) from None
                seen[reference] = measured
            result.append(measured)
        return result

    def _measure(
        self,
        reference: UnspannedReference,
        fetched: Mapping[str, bytes],
        cache_salt: str,
        reserve: Callable[[int], None],
    ) -> MeasuredItem:
        if isinstance(reference, VideoReference):
            return self._measure_video(reference, fetched, cache_salt, reserve)
        if isinstance(reference, EmbeddedImage | EmbeddedVideo):
            file = fetched.get(reference.source)
            if file is None:
                kind = kind_of(reference)
                file = read_embedded(reference.source, self._settings, reserve, kind)
            check_work(EMBEDDING_BYTES + len(file), self._settings, noun_of(reference))
            if isinstance(reference, EmbeddedVideo):
                return self._measure_embedded_video(file, cache_salt)
            return self._measure_embedded(file, cache_salt)
        return self._measure_image(reference, fetched, cache_salt, reserve)

    def _measure_video(
        self,
        video: VideoReference,
        fetched: Mapping[str, bytes],
        cache_salt: str,
        reserve: Callable[[int], None],
    ) -> MeasuredVideo:
        is_file = isinstance(video.source, str)
        if is_file:
            refuse_without_decoder()
        kind = kind_of(video)
        content = []
        for url in video.urls:
            found = fetched.get(url)
            content.append(
                read_local(url, self._settings, reserve, kind) if found is None else found
            )
            check_total(sum(map(len, content)), self._settings)
        digest = self._preprocessor.settings_digest
        key = video_key(
            settings_digest=digest,
            cache_salt=cache_salt,
            options=msgspec.json.encode((video.sampling, is_file)),
            encoded=content,
        )
        planned = self._plans.get(key) or self._plan_video(video, content)
        assert isinstance(planned.plan, VideoPlan)
        for group in planned.plan.groups:
            check_tokens(group.tokens, self._preprocessor.info)
        check_work(planned.work_bytes, self._settings, "video")
        return MeasuredVideo(
            key, planned.plan, tuple(content), is_file, planned.work_bytes, digest, cache_salt
        )

    def _plan_video(self, video: VideoReference, content: Sequence[bytes]) -> Planned:
        frames_max = self._settings.video_frames_max
        if isinstance(video.source, str):
            [file] = content
            facts = self._inspect_video(file)
            plan = self._preprocessor.plan_video(facts, video.sampling, frames_max=frames_max)
            return Planned(plan, decode_bytes(facts, len(file)) + plan.work_bytes)
        headers = [self._inspect(each) for each in content]
        sizes = {(header.width, header.height) for header in headers}
        if len(sizes) > 1:
            raise RequestRefused(
                limit_message(
                    "the frames of the video differ in size",
                    value=", ".join(f"{width}x{height}" for width, height in sorted(sizes)[:4]),
                    limit="one size",
                    remedy="resize the frames to one size, or send them as images",
                ),
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

    def _measure_image(
        self,
        reference: str | NamedImage | BoundedImage,
        fetched: Mapping[str, bytes],
        cache_salt: str,
        reserve: Callable[[int], None],
    ) -> MeasuredImage:
        bounds = reference.bounds if isinstance(reference, BoundedImage) else None
        front = within(self._preprocessor, bounds, self._settings.image_pixels_max)
        image, source = image_of(reference), source_of(reference)
        name: ImageName | None = None
        if isinstance(image, NamedImage):
            name = (cache_salt, image.uuid, front.settings_digest)
        if not isinstance(source, str):
            assert name is not None
            return self._named(name, bounds)
        encoded = fetched.get(source)
        if encoded is None:
            encoded = read_local(source, self._settings, reserve)
        key = item_key(
            settings_digest=front.settings_digest, cache_salt=cache_salt, encoded=encoded
        )
        planned = self._plans.get(key) or self._plan(encoded, front)
        plan, info = planned.plan, self._preprocessor.info
        assert isinstance(plan, ImagePlan)
        check_tokens(plan.tokens, info)
        check_work(planned.work_bytes, self._settings)
        size = extent_bytes(plan.arrays)
        return MeasuredImage(
            key, plan, encoded, len(encoded), size, planned.work_bytes, bounds, name
        )

    def _named(self, name: ImageName, bounds: PixelBounds | None) -> MeasuredImage:
        """An image that was sent before; it is checked later whether its pixels are still cached."""
        key = self._names.get(name)
        planned = self._plans.get(key) if key is not None else None
        if key is None or planned is None:
            raise unknown_image()
        assert isinstance(planned.plan, ImagePlan)
        size = extent_bytes(planned.plan.arrays)
        return MeasuredImage(key, planned.plan, b"", 0, size, planned.work_bytes, bounds, name)

    def _plan(self, encoded: bytes, front: Preprocessor) -> Planned:
        header = self._inspect(encoded)
        plan = front.plan_image(header.width, header.height)
        work_bytes = preprocess_bytes(header.width, header.height, header.storage, plan)
        return Planned(plan, work_bytes)

    def _measure_embedded(self, file: bytes, cache_salt: str) -> MeasuredImage:
        info, companion = self._preprocessor.info, self._preprocessor.companion
        if companion is None:
            raise _no_embeddings("image")
        plan_embedding = self._preprocessor.plan_embedding
        embeds, plan = read_embedding(file, info, companion, plan_embedding)
        key = self._embedding_key(embeds, plan.metadata, cache_salt)
        size = plan.tokens * info.embedding_row_bytes
        return MeasuredImage(key, plan, embeds, len(file), size, EMBEDDING_BYTES + len(file))

    def _measure_embedded_video(self, file: bytes, cache_salt: str) -> MeasuredVideoEmbedding:
        front = self._preprocessor
        info, companion, times = front.info, front.companion, front.video_times
        if companion is None or not times:
            raise _no_embeddings("video")
        embeds, plan = read_video_embedding(
            file,
            info,
            companion,
            times,
            seconds_max=self._settings.video_seconds_max,
            plan_video=functools.partial(
                front.plan_embedded_video, frames_max=self._settings.video_frames_max
            ),
        )
        keys = []
        start = 0
        for group in plan.groups:
            rows = embeds.rows(start, start + group.tokens)
            # Without its time: equal groups of several videos have one key.
            keys.append(self._embedding_key(rows, b"", cache_salt))
            start += group.tokens
        return MeasuredVideoEmbedding(
            key=video_key(
                settings_digest=front.settings_digest,
                cache_salt=cache_salt,
                options=b"embeddings",
                encoded=keys,
            ),
            plan=plan,
            content=embeds,
            group_keys=tuple(keys),
            received_bytes=len(file),
            row_bytes=info.embedding_row_bytes,
            work_bytes=EMBEDDING_BYTES + len(file),
        )

    def _embedding_key(self, embeds: Tensor, metadata: bytes, cache_salt: str) -> bytes:
        info = self._preprocessor.info
        return embedding_key(
            settings_digest=self._preprocessor.settings_digest,
            cache_salt=cache_salt,
            served=(info.dtype, info.hidden_size, info.embedding_levels),
            dtype=embeds.dtype,
            shape=embeds.shape,
            metadata=metadata,
            rows=embeds.data,
        )


def _no_embeddings(noun: str) -> RequestRefused:
    return RequestRefused(
        f"the model takes no embeddings of {noun}s. Remedy: send the {noun} itself.",
        code="embeddings_not_taken",
    )


def noun_of(reference: UnspannedReference) -> str:
    """Noun for errors about a reference."""
    return "video" if is_video(reference) else "image"


def check_permitted(references: Sequence[UnspannedReference], settings: MediaConfig) -> None:
    """Reject embeddings if they are disabled, and too many videos or frames.

    Raises:
        RequestRefused: With value, limit and remedy.
    """
    videos = [each for each in references if isinstance(each, VideoReference | EmbeddedVideo)]
    if len(videos) > settings.videos_max:
        message = limit_message(
            "the request has too many videos",
            value=f"{len(videos)} videos",
            limit=f"{settings.videos_max} videos",
            remedy="send fewer videos or raise media.videos_max",
        )
        raise RequestRefused(message, code="too_many_videos")
    for video in videos:
        if not isinstance(video.source, str) and not (
            0 < len(video.source) <= settings.video_frames_max
        ):
            message = limit_message(
                "a video has too many frames, or none",
                value=f"{len(video.source)} frames",
                limit=f"1 to {settings.video_frames_max} frames",
                remedy="send that many, or raise media.video_frames_max",
            )
            raise RequestRefused(message, code="video_frames_exceeded")
    if settings.allow_embeddings:
        return
    for index, reference in enumerate(references):
        if isinstance(reference, EmbeddedImage | EmbeddedVideo):
            noun = noun_of(reference)
            message = (
                "embeddings in requests are switched off: media.allow_embeddings is false. "
                f"Remedy: send the {noun} itself or set media.allow_embeddings = true."
            )
            raise blame(RequestRefused(message, code="embeddings_disabled"), index, noun)


def reference_bytes(reference: UnspannedReference) -> int:
    """Bytes of a reference during preparation: the reference itself, and its decoded base64."""
    if isinstance(reference, VideoReference):
        return sum(map(reference_bytes, reference.urls))
    if isinstance(reference, EmbeddedImage | EmbeddedVideo):
        source: str | NamedImage = reference.source
        if not scheme_of(reference.source):
            return base64_bytes(reference.source) * 7 // 4
    else:
        source = source_of(reference)
    if isinstance(source, NamedImage):
        return len(source.uuid)
    return base64_bytes(source) * 7 // 4 if is_data(source) else len(source)


def check_work(size: int, settings: MediaConfig, noun: str = "image") -> None:
    """Reject an image or a video whose processing needs more memory than the whole budget.

    Raises:
        RequestRefused: With value, limit and remedy.
    """
    if size > settings.decode_bytes:
        message = limit_message(
            f"the {noun} takes too much memory to decode and process",
            value=f"up to {size} bytes",
            limit=f"{settings.decode_bytes} bytes",
            remedy=f"send a smaller {noun} or raise media.decode_bytes",
        )
        raise RequestRefused(message, code=f"{noun}_too_large", status=413)


def check_total(total: int, settings: MediaConfig) -> None:
    """Reject a request whose images have too many encoded bytes in total.

    Raises:
        RequestRefused: With value, limit and remedy.
    """
    if total > settings.request_bytes_max:
        message = limit_message(
            "the images of this request are too large in total",
            value=f"{total} bytes",
            limit=f"{settings.request_bytes_max} bytes",
            remedy="send fewer or smaller images or raise media.request_bytes_max",
        )
        raise RequestRefused(message, code="images_too_large", status=413)
