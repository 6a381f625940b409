"""Whether the images that the configuration allows fit into the memory that it gives them."""

from __future__ import annotations

from vsched.config.sections import MediaConfig
from vsched.errors import ConfigError, limit_message

_JPEG_BYTES = 12
_WEBP_BYTES = 16
_STRIP_BYTES = 24_000_000


def decode_bytes_needed(media: MediaConfig) -> int:
    """Return the most that decoding one legal image may take, whatever its format.

    A test holds it to the estimates of `vsched.media.estimate`. What the image processor takes comes on top only where
    it makes an image larger, which depends on the checkpoint; such an image is refused when it comes.
    """
    pixels = max(
        media.image_pixels_max * _JPEG_BYTES,
        min(media.webp_pixels_max, media.image_pixels_max) * _WEBP_BYTES,
    )
    return pixels + _STRIP_BYTES + 4 * media.image_bytes_max


def check_decode_bytes(media: MediaConfig) -> None:
    """Refuse a budget that could never admit an image that is legal otherwise.

    Raises:
        ConfigError: With value, limit and remedy.
    """
    needed = decode_bytes_needed(media)
    if media.decode_bytes < needed:
        raise ConfigError(
            limit_message(
                "media.decode_bytes: too small to decode the largest image (media.image_pixels_max)",
                value=media.decode_bytes,
                limit=f"at least {needed}",
                remedy="raise media.decode_bytes, or lower media.image_pixels_max, "
                "media.webp_pixels_max and media.image_bytes_max",
            )
        )
