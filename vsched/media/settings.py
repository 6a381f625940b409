"""The limits and permissions of the media pipeline."""

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
"""The images that are accepted: media types, and what Pillow calls the formats."""

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]


class MediaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request may bring and from where.

    Attributes:
        image_bytes_max: Bytes of one encoded image, however it arrives.
        image_pixels_max: Width times height of one image, read from its header before any pixel is decoded.
        webp_pixels_max: The same for WEBP, whose decoder stalls the event loop while it copies pixels.
        images_max: Images of one request; 0 refuses them all.
        request_bytes_max: Bytes of all encoded images of one request.
        directory: The only directory that `file:` references may lie under; empty refuses them all.
        hosts: Hosts that `http(s):` references may name, each `host` or `host:port`; empty refuses them all.
        private_hosts: Those of `hosts` that may resolve to private or loopback addresses; link-local ones never may.
        allow_embeddings: Whether a request may bring finished embeddings in place of images.
        fetch_s: Total time of one http fetch, name resolution included.
        prepare_s: Total time of one request's preparation, waiting for space included.
        preparing_max: Requests in preparation at once; more are told to come back.
        preparing_bytes_max: Encoded bytes that the requests in preparation may hold together, as sent and as read.
        decode_bytes: Host memory that decoding and processing images may take together; images wait for it.
        threads: Size of the pool that decodes and processes.
        plans_max: Images whose plan is remembered.
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
