"""Checks of the media section: the memory for the largest image, and the syntax of hosts."""

from __future__ import annotations

import re

from vsched.config.sections import MediaConfig
from vsched.errors import ConfigError, ConfigProblems, limit_message

_HOST = re.compile(r"(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?", re.IGNORECASE)

_JPEG_BYTES = 12
_WEBP_BYTES = 16
_STRIP_BYTES = 24_000_000


def decode_bytes_needed(media: MediaConfig) -> int:
    """Maximum memory for decoding one image within the limits, in any format.

    A test compares it with the estimates in `vsched.media.estimate`. The image processor needs more memory only if it
    enlarges an image, which depends on the checkpoint; such an image is refused when it arrives.
    """
    pixels = max(
        media.image_pixels_max * _JPEG_BYTES,
        min(media.webp_pixels_max, media.image_pixels_max) * _WEBP_BYTES,
    )
    return pixels + _STRIP_BYTES + 4 * media.image_bytes_max


def check_decode_bytes(media: MediaConfig) -> None:
    """Reject a budget that could never admit an image within the other limits.

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


def check_image_hosts(media: MediaConfig) -> None:
    """Reject malformed hosts, which would silently match no URL.

    Raises:
        ConfigError: Each line starts with the path of a key.
    """
    problems = ConfigProblems()
    for key, values in (("hosts", media.hosts), ("private_hosts", media.private_hosts)):
        for value in values:
            found = _HOST.fullmatch(value)
            if found is None or not 0 < int(found["port"] or 80) < 65536:
                problems.add(
                    limit_message(
                        f"media.{key}: no image URL has this host",
                        value=repr(value),
                        limit="host or host:port, as images.example.com or [::1]:8080, port 1 to 65535",
                        remedy="write it in that form, without a scheme or a path",
                    )
                )
    problems.tell()
