"""The first half of a preparation, in a pool thread: bytes, digest and token count of every image, no pixels yet."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vsched.errors import RequestRefused, limit_message
from vsched.media.decode import PixelLimits, inspect
from vsched.media.settings import MediaSettings
from vsched.media.sources import read_local
from vsched.worker.contract import ImagePlan, Preprocessor

_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Measured:
    """One image of a request before its pixels exist."""

    key: bytes
    plan: ImagePlan
    encoded: bytes


def item_key(*, settings_digest: bytes, cache_salt: str, encoded: bytes) -> bytes:
    """Return the 32-byte key of an item.

    Source: requirements D14 and G9. Each part carries its type and length, so that no two lists of parts give the same
    bytes. Mode, size and dtype of the pixels follow from the encoded bytes and the processor's settings.
    """
    digest = hashlib.blake2b(digest_size=_KEY_BYTES, person=b"vsched.item.v1")
    parts = (
        (b"P", settings_digest),
        (b"T", cache_salt.encode("utf-8", "surrogatepass")),
        (b"I", encoded),
    )
    for kind, part in parts:
        digest.update(kind + len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def blame(error: RequestRefused, index: int) -> RequestRefused:
    """Return a refusal that names the image it is about."""
    return RequestRefused(
        f"image {index}: {error.message}",
        code=error.code,
        status=error.status,
        retry_after_s=error.retry_after_s,
    )


def pixel_limits(settings: MediaSettings) -> PixelLimits:
    """Return the part of the settings that the decoder keeps."""
    return PixelLimits(image=settings.image_pixels_max, webp=settings.webp_pixels_max)


class Measurer:
    """Measures the images of requests; called from several threads at once.

    `plans` is only read here; the event loop fills it.
    """

    def __init__(
        self, preprocessor: Preprocessor, settings: MediaSettings, plans: Mapping[bytes, ImagePlan]
    ) -> None:
        self._preprocessor = preprocessor
        self._settings = settings
        self._plans = plans
        self._limits = pixel_limits(settings)

    def measure(
        self, references: Sequence[str], fetched: Mapping[str, bytes], cache_salt: str
    ) -> list[Measured]:
        """Return what each reference holds, in order.

        Blocks: on base64, hashing and files; call it off the event loop.

        Raises:
            RequestRefused: When one of them cannot be read or accepted; the message names its index.
        """
        seen: dict[str, Measured] = {}
        total = 0
        result: list[Measured] = []
        for index, reference in enumerate(references):
            measured = seen.get(reference)
            if measured is None:
                try:
                    measured = self._measure_one(reference, fetched, cache_salt)
                    total += len(measured.encoded)
                    check_total(total, self._settings)
                except RequestRefused as error:
                    raise blame(error, index) from None
                seen[reference] = measured
            result.append(measured)
        return result

    def _measure_one(
        self, reference: str, fetched: Mapping[str, bytes], cache_salt: str
    ) -> Measured:
        encoded = fetched.get(reference)
        if encoded is None:
            encoded = read_local(reference, self._settings)
        key = item_key(
            settings_digest=self._preprocessor.settings_digest,
            cache_salt=cache_salt,
            encoded=encoded,
        )
        plan = self._plans.get(key)
        if plan is None:
            header = inspect(encoded, self._limits)
            plan = self._preprocessor.plan_image(header.width, header.height)
        limit = self._preprocessor.info.item_tokens_max
        if plan.tokens > limit:
            message = limit_message(
                "the image has too many tokens",
                value=f"{plan.tokens} tokens",
                limit=f"{limit} tokens",
                remedy="send a smaller image or raise the encode stage's token budget",
            )
            raise RequestRefused(message, code="image_tokens_exceeded")
        return Measured(key, plan, encoded)


def check_total(total: int, settings: MediaSettings) -> None:
    """Refuse a request whose images have too many encoded bytes together.

    Raises:
        RequestRefused: With value, limit and remedy.
    """
    if total > settings.request_bytes_max:
        message = limit_message(
            "the images of this request are too large together",
            value=f"{total} bytes",
            limit=f"{settings.request_bytes_max} bytes",
            remedy="send fewer or smaller images or raise media.request_bytes_max",
        )
        raise RequestRefused(message, code="images_too_large", status=413)
