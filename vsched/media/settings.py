"""Limits and permissions of the media pipeline."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

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

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]


class MediaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits and permitted sources of images in requests.

    Attributes:
        image_bytes_max: Bytes of one encoded image from any source.
        image_pixels_max: Width times height of one image, read from its header before pixels are decoded.
        webp_pixels_max: The same for WEBP, whose decoder blocks the event loop while it copies pixels.
        images_max: Images per request; 0 refuses all images.
        request_bytes_max: Bytes of all encoded images of one request.
        directory: The only directory for `file:` references; empty refuses them all.
        hosts: Permitted hosts of `http(s):` references, each `host` or `host:port`; empty refuses them all.
        private_hosts: Hosts that may resolve to private or loopback addresses, a subset of `hosts`; link-local
            addresses are never permitted.
        allow_embeddings: Accept precomputed embeddings in place of images.
        fetch_s: Total time of one HTTP fetch, including name resolution.
        prepare_s: Total time of one request's preparation, including waits for space.
        preparing_max: Requests in preparation at once; further ones get a 429.
        preparing_bytes_max: Encoded bytes that the requests in preparation may hold in total, as sent and as read.
        decode_bytes: Host memory for decoding and processing images in total; images wait for it.
        threads: Size of the thread pool for decoding and processing.
        plans_max: Number of images whose plan is remembered.
    """

    image_bytes_max: _Positive = 20 * 1024 * 1024
    image_pixels_max: _Positive = 64_000_000
    webp_pixels_max: _Positive = 16_000_000
    images_max: Annotated[int, msgspec.Meta(ge=0)] = 64
    request_bytes_max: _Positive = 64 * 1024 * 1024
    directory: str = ""
    hosts: tuple[str, ...] = ()
    private_hosts: tuple[str, ...] = ()
    allow_embeddings: bool = False
    fetch_s: _Seconds = 10.0
    prepare_s: _Seconds = 30.0
    preparing_max: _Positive = 512
    preparing_bytes_max: _Positive = 512 * 1024 * 1024
    decode_bytes: _Positive = 1024 * 1024 * 1024
    threads: _Positive = 2
    plans_max: _Positive = 8192
