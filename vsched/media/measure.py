"""First half of a preparation, in a pool thread: bytes, digest and token count of every image, but no pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from vsched.errors import RequestRefused, limit_message
from vsched.media.base64_text import base64_bytes
from vsched.media.decode import DecodeLimits, ImageHeader, inspect
from vsched.media.embeddings import (
    BoundedImage,
    EmbeddedImage,
    Embedding,
    ImageReference,
    NamedImage,
    check_tokens,
    read_embedding,
)
from vsched.media.estimate import EMBEDDING_BYTES, preprocess_bytes
from vsched.media.keys import embedding_key, item_key
from vsched.media.sources import is_data, read_embedded, read_local
from vsched.types import ModelInfo
from vsched.worker.contract import (
    ImagePlan,
    ImageProcessing,
    PixelBounds,
    Preprocessor,
    extent_bytes,
)

if TYPE_CHECKING:
    from vsched.config.sections import MediaConfig

ImageName = tuple[str, str, bytes]
"""Cache salt of the requests, client-defined uuid of the image, and digest of the processor settings."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One image of a request before its pixels are decoded.

    Attributes:
        content: The encoded image or embedding; empty for a reference by name.
        received_bytes: Bytes that the client sent for it.
        extent_bytes: Bytes that it takes in the arena's pixel region.
        work_bytes: Maximum host memory of a thread that fills its extent.
        bounds: Pixel bounds for resizing; None for the checkpoint's.
        name: Name under which it is remembered, if the client gave one.
    """

    key: bytes
    plan: ImagePlan
    content: bytes | Embedding
    received_bytes: int
    extent_bytes: int
    work_bytes: int
    bounds: PixelBounds | None = None
    name: ImageName | None = None

    @property
    def is_embedded(self) -> bool:
        """True if the client sent an embedding."""
        return isinstance(self.content, Embedding)

    @property
    def is_sent(self) -> bool:
        """True if the client sent it with this request, and not only its name."""
        return bool(self.content)


@dataclass(frozen=True, slots=True)
class Planned:
    """Remembered facts about an image that was measured before."""

    plan: ImagePlan
    work_bytes: int


def source_of(reference: ImageReference) -> str | EmbeddedImage | NamedImage:
    """Data source of a reference; the image itself if it is only a name."""
    image = image_of(reference)
    if isinstance(image, NamedImage) and image.reference is not None:
        return image.reference
    return image


def image_of(reference: ImageReference) -> str | EmbeddedImage | NamedImage:
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


def refuse_images(info: ModelInfo) -> None:
    """Reject a request with images if the model takes none.

    Raises:
        RequestRefused: With status 400.
    """
    if not info.takes_images:
        raise RequestRefused(
            "the model takes no images. Remedy: send text alone, or ask a model that sees.",
            code="images_not_taken",
        )


def blame(error: RequestRefused, index: int) -> RequestRefused:
    """Add the index of the image to an error."""
    return RequestRefused(
        f"image {index}: {error.message}",
        code=error.code,
        status=error.status,
        retry_after_s=error.retry_after_s,
    )


def pixel_limits(settings: MediaConfig) -> DecodeLimits:
    """The decoder's limits from the settings."""
    return DecodeLimits(image=settings.image_pixels_max, webp=settings.webp_pixels_max)


class Measurer:
    """Measures the images of requests; called from several threads at once.

    `plans` and `names` are only read here; the event loop fills them. `inspect_isolated` reads image headers in an
    isolated process; by default they are read in the calling thread.
    """

    def __init__(
        self,
        preprocessor: Preprocessor,
        settings: MediaConfig,
        plans: Mapping[bytes, Planned],
        names: Mapping[ImageName, bytes],
        inspect_isolated: Callable[[bytes], ImageHeader] | None = None,
    ) -> None:
        self._preprocessor = preprocessor
        self._settings = settings
        self._plans = plans
        self._names = names
        limits = pixel_limits(settings)
        self._inspect = inspect_isolated or (lambda encoded: inspect(encoded, limits))

    def measure(
        self,
        references: Sequence[ImageReference],
        fetched: Mapping[str, bytes],
        cache_salt: str,
        reserve: Callable[[int], None],
    ) -> list[Measured]:
        """Measure the images of all references, in order; `reserve` counts the bytes of files before they are read.

        Blocks: for base64, hashing and files; call it off the event loop.

        Raises:
            RequestRefused: If one of them cannot be read or accepted; the message has its index.
        """
        seen: dict[ImageReference, Measured] = {}
        total = 0
        result: list[Measured] = []
        for index, reference in enumerate(references):
            measured = seen.get(reference)
            if measured is None:
                try:
                    source = source_of(reference)
                    if isinstance(source, EmbeddedImage):
                        measured = self._measure_embedded(source, cache_salt)
                    else:
                        measured = self._measure_image(reference, fetched, cache_salt, reserve)
                    total += measured.received_bytes
                    check_total(total, self._settings)
                except RequestRefused as error:
                    raise blame(error, index) from None
                seen[reference] = measured
            result.append(measured)
        return result

    def _measure_image(
        self,
        reference: ImageReference,
        fetched: Mapping[str, bytes],
        cache_salt: str,
        reserve: Callable[[int], None],
    ) -> Measured:
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
        check_tokens(plan.tokens, info)
        check_work(planned.work_bytes, self._settings)
        size = extent_bytes(plan.arrays)
        return Measured(key, plan, encoded, len(encoded), size, planned.work_bytes, bounds, name)

    def _named(self, name: ImageName, bounds: PixelBounds | None) -> Measured:
        """An image that was sent before; it is checked later whether its pixels are still cached."""
        key = self._names.get(name)
        planned = self._plans.get(key) if key is not None else None
        if key is None or planned is None:
            raise unknown_image()
        size = extent_bytes(planned.plan.arrays)
        return Measured(key, planned.plan, b"", 0, size, planned.work_bytes, bounds, name)

    def _plan(self, encoded: bytes, front: Preprocessor) -> Planned:
        header = self._inspect(encoded)
        plan = front.plan_image(header.width, header.height)
        work_bytes = preprocess_bytes(header.width, header.height, header.storage, plan)
        return Planned(plan, work_bytes)

    def _measure_embedded(self, image: EmbeddedImage, cache_salt: str) -> Measured:
        info, companion = self._preprocessor.info, self._preprocessor.companion
        if companion is None:
            raise RequestRefused(
                "the model takes no embeddings of images. Remedy: send the image itself.",
                code="embeddings_not_taken",
            )
        file = read_embedded(image, self._settings)
        embedding = read_embedding(file, info, companion, self._preprocessor.plan_embedding)
        embeds = embedding.embeds
        key = embedding_key(
            settings_digest=self._preprocessor.settings_digest,
            cache_salt=cache_salt,
            served=(info.dtype, info.hidden_size, info.embedding_levels),
            dtype=embeds.dtype,
            shape=embeds.shape,
            metadata=embedding.plan.metadata,
            rows=embeds.data,
        )
        row_bytes = info.embedding_row_bytes
        work_bytes = EMBEDDING_BYTES + len(file)
        check_work(work_bytes, self._settings)
        extent_bytes = embedding.plan.tokens * row_bytes
        return Measured(key, embedding.plan, embedding, len(file), extent_bytes, work_bytes)


def check_permitted(references: Sequence[ImageReference], settings: MediaConfig) -> None:
    """Reject embeddings if they are disabled.

    Raises:
        RequestRefused: With the index of the first one.
    """
    if settings.allow_embeddings:
        return
    for index, reference in enumerate(references):
        if isinstance(reference, EmbeddedImage):
            message = (
                "embeddings in requests are switched off: media.allow_embeddings is false. "
                "Remedy: send the image itself or set media.allow_embeddings = true."
            )
            raise blame(RequestRefused(message, code="embeddings_disabled"), index)


def reference_bytes(reference: ImageReference) -> int:
    """Bytes of a reference during preparation: the reference itself, and its decoded base64."""
    source = source_of(reference)
    if isinstance(source, EmbeddedImage):
        return base64_bytes(source.data) * 7 // 4
    if isinstance(source, NamedImage):
        return len(source.uuid)
    return base64_bytes(source) * 7 // 4 if is_data(source) else len(source)


def check_work(size: int, settings: MediaConfig) -> None:
    """Reject an image whose processing needs more memory than the whole budget.

    Raises:
        RequestRefused: With value, limit and remedy.
    """
    if size > settings.decode_bytes:
        message = limit_message(
            "the image takes too much memory to decode and process",
            value=f"up to {size} bytes",
            limit=f"{settings.decode_bytes} bytes",
            remedy="send a smaller image or raise media.decode_bytes",
        )
        raise RequestRefused(message, code="image_too_large", status=413)


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
