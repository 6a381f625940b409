"""Accepted formats of images and videos."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vsched.config.sections import MediaConfig

FORMATS: Final = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
    "image/bmp": "BMP",
}
"""Accepted image formats: media types and Pillow's names.

TIFF is not accepted: its header does not bound the memory of opening it, since Pillow copies the value of every tag
(65,535 tags may point to the same 20 MB) and follows chains of directories, and its codecs allocate tiles and
dictionaries of any size. It needs a parser of the first directory that bounds all of these.
"""

VIDEO_FORMATS: Final = {
    "video/mp4": "MP4",
    "video/quicktime": "MOV",
    "video/webm": "WebM",
    "video/x-matroska": "Matroska",
    "video/x-msvideo": "AVI",
    "video/mp2t": "MPEG-TS",
    "image/gif": "GIF",
}
"""Accepted video containers: media types and names."""


@dataclass(frozen=True, slots=True)
class MediaKind:
    """A kind of media files, for reading them from URLs.

    Attributes:
        noun: Its name in error messages and error codes.
        formats: Accepted media types.
        aliases: Other media types that clients send for them.
        limited_as: Noun in the key of its limit, if that is another.
    """

    noun: str
    formats: Mapping[str, str]
    aliases: tuple[str, ...]
    limited_as: str = ""

    @property
    def limit(self) -> str:
        """The key of the maximum size of a file, in `media`."""
        return f"{self.limited_as or self.noun}_bytes_max"

    def bytes_max(self, settings: MediaConfig) -> int:
        """The maximum size of a file."""
        found: int = getattr(settings, self.limit)
        return found


_DEFAULTS = ("text/plain", "application/octet-stream")
"""Defaults of libraries; the content decides."""

IMAGE: Final = MediaKind(
    "image",
    FORMATS,
    ("image/jpg", "image/pjpeg", "image/x-png", "image/apng", "image/x-ms-bmp", *_DEFAULTS),
)
VIDEO: Final = MediaKind(
    "video",
    VIDEO_FORMATS,
    (
        *("video/x-m4v", "video/mov", "video/matroska", "video/mkv", "video/avi", "video/msvideo"),
        *("video/mpeg", "video/mpegts", *_DEFAULTS),
    ),
)
_TENSORS: Final = {"application/octet-stream": "safetensors"}
_TENSOR_ALIASES: Final = ("application/safetensors", "application/x-safetensors", "text/plain")
IMAGE_EMBEDDING: Final = MediaKind("embedding", _TENSORS, _TENSOR_ALIASES, IMAGE.noun)
VIDEO_EMBEDDING: Final = MediaKind("embedding", _TENSORS, _TENSOR_ALIASES, VIDEO.noun)
