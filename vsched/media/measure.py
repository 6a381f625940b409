"""First half of a preparation, in a pool thread: bytes, digest and token count of every image, but no pixels."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import msgspec

from vsched.errors import RequestRefused, limit_message
from vsched.isolated.calls import CallCancellation
from vsched.media.decode import DecodeLimits, ImageHeader
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
from vsched.media.fetch import Reserve, uncounted
from vsched.media.formats import IMAGE, IMAGE_EMBEDDING, VIDEO, VIDEO_EMBEDDING, MediaKind
from vsched.media.keys import embedding_key, group_key, item_key, video_key
from vsched.media.sources import is_data, read_embedded, read_local, scheme_of
from vsched.media.video import VideoLimits, decode_bytes, refuse_without_decoder
from vsched.types import ArraySpec, Extent, ModelInfo
from vsched.worker.contract import (
    FrameSize,
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


class Filled(NamedTuple):
    """The result of filling an extent: the key of its content, and the changes of its tokens as in `PixelStore`."""

    key: bytes
    changes: bytes = b""


class VideoOrder(msgspec.Struct, frozen=True):
    """The frame groups of a video to process.

    Attributes:
        frames: Numbers of the frames of all groups; equal ones are adjacent.
        size: The size that they are resized to.
        groups: The arrays of each group.
        tokens: Number of tokens of each group.
        files: Sizes of the files of its frames, which follow each other; empty for a video file.
        settings_digest: Part of the content's keys, as is `cache_salt`.
        with_changes: Whether to compute the changes of tokens from group to group.
    """

    frames: tuple[int, ...]
    size: FrameSize
    groups: tuple[tuple[ArraySpec, ...], ...]
    tokens: tuple[int, ...]
    files: tuple[int, ...]
    settings_digest: bytes
    cache_salt: str
    with_changes: bool = False


@dataclass(frozen=True, slots=True)
class MeasuredItem:
    """One image or video of a request before its pixels are decoded.

    Attributes:
        content: The encoded image, the file of a video or those of its frames, or the rows of an embedding; empty for a
            reference by name.
        extents: Bytes in the arena's pixel region, of the image or each frame group, by key.
        received_bytes: Bytes that the client sent for it.
        work_bytes: Maximum host memory of a thread that fills its extents.
        bounds: Pixel bounds for resizing an image; None for the checkpoint's.
        name: Name under which it is remembered, if the client gave one.
        video: How to process a video.
        content_keys: The key of each extent's content, if it is known and another than that of the extent.
    """

    key: bytes
    plan: ItemPlan
    content: bytes | Tensor
    extents: Mapping[bytes, int]
    received_bytes: int
    work_bytes: int
    bounds: PixelBounds | None = None
    name: ImageName | None = None
    video: VideoOrder | None = None
    content_keys: tuple[bytes, ...] = ()

    @property
    def groups(self) -> tuple[ImagePlan, ...]:
        """The plan of each extent."""
        return self.plan.groups if isinstance(self.plan, VideoPlan) else (self.plan,)

    @property
    def noun(self) -> str:
        """Its name in errors."""
        return "video" if isinstance(self.plan, VideoPlan) else "image"

    @property
    def is_embedded(self) -> bool:
        """True if the client sent an embedding."""
        return isinstance(self.content, Tensor)


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


class Pictures(Protocol):
    """Decoders of untrusted images and videos; called in threads.

    Each method raises `RequestRefused` for content that cannot be served, and `RequestFailed` for other failures.
    """

    def inspect(self, encoded: bytes) -> ImageHeader:
        """Return the header of an image."""
        ...

    def inspect_video(self, encoded: bytes, cancellation: CallCancellation) -> VideoFacts:
        """Return the facts of a video."""
        ...

    def fill(
        self, item: MeasuredItem, places: Sequence[Extent], cancellation: CallCancellation
    ) -> tuple[Filled, ...]:
        """Fill the extents of an item that is not embedded; nothing writes to them afterwards."""
        ...


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
        self, references: Sequence[UnspannedReference], files: RequestFiles
    ) -> list[MeasuredItem]:
        """Measure the images of all references, in order.

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
                    measured = self._measure(reference, files)
                    total += measured.received_bytes
                    check_total(total, self._settings)
                except RequestRefused as error:
                    raise blame(error, index, noun_of(reference)) from None
                seen[reference] = measured
            result.append(measured)
        return result

    def _measure(self, reference: UnspannedReference, files: RequestFiles) -> MeasuredItem:
        if isinstance(reference, VideoReference):
            return self._measure_video(reference, files)
        if isinstance(reference, EmbeddedImage | EmbeddedVideo):
            file = files.fetched.get(reference.source)
            if file is None:
                kind = kind_of(reference)
                file = read_embedded(reference.source, self._settings, files.reserve, kind)
            check_work(EMBEDDING_BYTES + len(file), self._settings, noun_of(reference))
            return self._measure_embedded(file, reference, files.cache_salt)
        return self._measure_image(reference, files)

    def _measure_video(self, video: VideoReference, files: RequestFiles) -> MeasuredItem:
        is_file = isinstance(video.source, str)
        if is_file:
            refuse_without_decoder()
        kind, encoded = kind_of(video), []
        for url in video.urls:
            found = files.fetched.get(url)
            if found is None:
                found = read_local(url, self._settings, files.reserve, kind)
            encoded.append(found)
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
        sizes = [extent_bytes(group.arrays) for group in plan.groups]
        return MeasuredItem(
            key,
            plan,
            content,
            _group_extents(key, sizes),
            len(content),
            planned.work_bytes,
            video=order,
        )

    def _plan_video(
        self, video: VideoReference, content: Sequence[bytes], cancellation: CallCancellation
    ) -> Planned:
        frames_max = self._settings.video_frames_max
        if isinstance(video.source, str):
            [file] = content
            facts = self._pictures.inspect_video(file, cancellation)
            plan = self._preprocessor.plan_video(facts, video.sampling, frames_max=frames_max)
            return Planned(plan, decode_bytes(facts, len(file)) + plan.work_bytes)
        headers = [self._pictures.inspect(each) for each in content]
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
        self, reference: str | NamedImage | BoundedImage, files: RequestFiles
    ) -> MeasuredItem:
        bounds = reference.bounds if isinstance(reference, BoundedImage) else None
        front = within(self._preprocessor, bounds, self._settings.image_pixels_max)
        digest, salt = front.settings_digest, files.cache_salt
        image, source = image_of(reference), source_of(reference)
        name = (salt, image.uuid, digest) if isinstance(image, NamedImage) else None
        if isinstance(source, str):
            found = files.fetched.get(source)
            encoded = read_local(source, self._settings, files.reserve) if found is None else found
            key = item_key(settings_digest=digest, cache_salt=salt, encoded=encoded)
            planned = self._plans.get(key) or self._plan(encoded, front)
        else:  # it was sent before; it is checked later whether its pixels are still cached
            assert name is not None
            encoded, key = b"", self._names.get(name, b"")
            kept = self._plans.get(key)
            if kept is None:
                raise unknown_image()
            planned = kept
        plan = planned.plan
        assert isinstance(plan, ImagePlan)
        check_tokens(plan.tokens, self._preprocessor.info)
        check_work(planned.work_bytes, self._settings)
        extents = {key: extent_bytes(plan.arrays)}
        return MeasuredItem(
            key, plan, encoded, extents, len(encoded), planned.work_bytes, bounds, name
        )

    def _plan(self, encoded: bytes, front: Preprocessor) -> Planned:
        header = self._pictures.inspect(encoded)
        plan = front.plan_image(header.width, header.height)
        work_bytes = preprocess_bytes(header.width, header.height, header.storage, plan)
        return Planned(plan, work_bytes)

    def _measure_embedded(
        self, file: bytes, reference: EmbeddedImage | EmbeddedVideo, cache_salt: str
    ) -> MeasuredItem:
        front, settings = self._preprocessor, self._settings
        info, companion, times = front.info, front.companion, front.video_times
        is_video = isinstance(reference, EmbeddedVideo)
        if companion is None or (is_video and not times):
            raise _no_embeddings(noun_of(reference))
        plan: ItemPlan
        if is_video:
            embeds, plan = read_video_embedding(
                file,
                info,
                companion,
                times,
                seconds_max=settings.video_seconds_max,
                plan_video=functools.partial(
                    front.plan_embedded_video, frames_max=settings.video_frames_max
                ),
            )
            groups = plan.groups
        else:
            embeds, plan = read_embedding(file, info, companion, front.plan_embedding)
            groups = (plan,)
        keys, start = [], 0
        for group in groups:
            rows = embeds.rows(start, start + group.tokens)
            start += group.tokens
            keys.append(
                embedding_key(
                    settings_digest=front.settings_digest,
                    cache_salt=cache_salt,
                    served=(info.dtype, info.hidden_size, info.embedding_levels),
                    dtype=rows.dtype,
                    shape=rows.shape,
                    # Without the time of a frame group: equal ones of several videos have one key.
                    metadata=b"" if is_video else group.metadata,
                    rows=rows.data,
                )
            )
        sizes = [group.tokens * info.embedding_row_bytes for group in groups]
        if is_video:
            key = video_key(
                settings_digest=front.settings_digest,
                cache_salt=cache_salt,
                options=b"embeddings",
                encoded=keys,
            )
            extents = _group_extents(key, sizes)
        else:
            [key] = keys
            extents = {key: sizes[0]}
        work_bytes = EMBEDDING_BYTES + len(file)
        return MeasuredItem(
            key, plan, embeds, extents, len(file), work_bytes, content_keys=tuple(keys)
        )


def _group_extents(video: bytes, sizes: Sequence[int]) -> dict[bytes, int]:
    return {group_key(video, index): size for index, size in enumerate(sizes)}


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
            return len(reference.source) * 7 // 4
    else:
        source = source_of(reference)
    if isinstance(source, NamedImage):
        return len(source.uuid)
    return len(source) * 7 // 4 if is_data(source) else len(source)


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
