"""Read the image of one OpenAI image reference: `data:`, `file:` or, if allowed, `http(s):`.

References are untrusted. The length is checked before anything is decoded. A reference is never logged, and no error
message quotes it, or a path or an address derived from it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote, urlsplit

from vsched.errors import RequestRefused, limit_message, one_of
from vsched.media.base64_text import (
    base64_bytes,
    base64_of,
    decode_base64,
    percent_decode,
    plain_base64_bytes,
)
from vsched.media.embeddings import EmbeddedImage, malformed
from vsched.media.fetch import Reserve, fetch, uncounted
from vsched.media.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from vsched.config.sections import MediaConfig

_MEDIA_TYPES = frozenset(
    (
        *(*FORMATS, "image/jpg", "image/pjpeg", "image/x-png", "image/apng", "image/x-ms-bmp"),
        *("text/plain", "application/octet-stream"),  # defaults of libraries; the content decides
    )
)
_MEDIA_TYPE = re.compile(r"[!#$%&'*+.^_`|~\w-]+/[!#$%&'*+.^_`|~\w-]+", re.ASCII)
_BASE64_HEADER = re.compile(r"; *base64\Z", re.IGNORECASE)
_URL_EDGES = "".join(map(chr, range(ord(" ") + 1)))
"""Control characters and spaces, which browsers strip from both ends of a URL."""
_LINE_BREAKS = b"\t\n\r"
_ENCODED_RATIO_MAX = 3
"""Percent-encoding expands one character to three."""
_BASE64_FAULT = "its base64 is not valid; its alphabet has + and /, not - and _"


def refuse_size(
    size: int | str, limit: int, what: str = "the encoded image is too large"
) -> RequestRefused:
    """Error for an image with too many encoded bytes."""
    message = limit_message(
        what,
        value=f"{size} bytes",
        limit=f"{limit} bytes",
        remedy="send a smaller image or raise media.image_bytes_max",
    )
    return RequestRefused(message, code="image_too_large", status=413)


def scheme_of(reference: str) -> str:
    """Scheme of a reference in lower case; empty if it has none."""
    head, colon, _ = reference.lstrip(_URL_EDGES)[:16].partition(":")
    return head.lower() if colon else ""


def is_local(reference: str) -> bool:
    """True if this reference can be read without the network."""
    return scheme_of(reference) not in {"http", "https"}


def is_data(reference: str) -> bool:
    """True if the reference contains the image itself."""
    return scheme_of(reference) == "data"


def read_local(reference: str, settings: MediaConfig, reserve: Reserve = uncounted) -> bytes:
    """Read a `data:` or `file:` reference; `reserve` counts the bytes of a file before they are read.

    Blocks: for base64 and the file system; call it off the event loop.

    Raises:
        RequestRefused: If the reference is malformed, not allowed, or too large.
    """
    scheme = scheme_of(reference)
    if scheme == "data":
        return _read_data(reference, settings)
    if scheme == "file":
        return _read_file(reference, settings, reserve)
    message = limit_message(
        "the image reference has an unknown scheme",
        value=scheme if scheme.isalnum() and scheme.isascii() else "none",
        limit="data:, file:, http: or https:",
        remedy="send the image as a data: URL",
    )
    raise RequestRefused(message, code="image_reference_invalid")


ReadRemote: TypeAlias = "Callable[[str, MediaConfig, Reserve], Awaitable[bytes]]"
"""Signature of `read_remote`."""


async def read_remote(reference: str, settings: MediaConfig, reserve: Reserve = uncounted) -> bytes:
    """Read an `http(s):` reference; `reserve` counts the bytes as they arrive.

    Blocks: up to `settings.fetch_s`.

    Raises:
        RequestRefused: If the host is not allowed, the fetch fails, or the response is too large.
    """
    return await fetch(reference, settings, reserve)


def _malformed(detail: str) -> RequestRefused:
    message = f"the data: URL is malformed: {detail}. Remedy: send data:image/png;base64,<image>."
    return RequestRefused(message, code="image_reference_invalid")


def _read_data(reference: str, settings: MediaConfig) -> bytes:
    """Read a `data:` URL as browsers do: RFC 2397, and the Fetch standard's data: URL processor."""
    comma = reference.find(",")
    if comma < 0:
        raise _malformed("it has no comma")
    header = reference[:comma].translate(dict.fromkeys(_LINE_BREAKS))
    header = header.partition(":")[2].strip(_URL_EDGES)
    is_base64 = _BASE64_HEADER.search(header) is not None
    media_type, *parameters = (part.strip(_URL_EDGES).lower() for part in header.split(";"))
    if "base64" in parameters and not is_base64:
        raise _malformed(";base64 must be last before the comma")
    # Without a valid media type, the first bytes of the image decide.
    if _MEDIA_TYPE.fullmatch(media_type) and media_type not in _MEDIA_TYPES:
        message = limit_message(
            "the image's media type is not accepted",
            value="another type",
            limit=one_of(FORMATS),
            remedy="convert the image to one of these",
        )
        raise RequestRefused(message, code="image_type_unsupported")
    if is_base64:
        return _decode_base64(
            reference,
            comma + 1,
            settings.image_bytes_max,
            malformed=_malformed,
            what="the encoded image is too large",
        )
    return _percent_decode(reference, comma + 1, settings.image_bytes_max)


def _percent_decode(reference: str, start: int, bytes_max: int) -> bytes:
    size = base64_bytes(reference, start)
    if size > bytes_max * _ENCODED_RATIO_MAX:
        raise refuse_size(size // _ENCODED_RATIO_MAX, bytes_max)
    try:
        encoded = base64_of(reference, start)
    except ValueError:
        raise _malformed("it has characters that are not ASCII") from None
    content = percent_decode(encoded.translate(None, _LINE_BREAKS).rstrip(_URL_EDGES.encode()))
    if len(content) > bytes_max:
        raise refuse_size(len(content), bytes_max)
    if not content:
        raise _malformed("it holds no image")
    return content


def read_embedded(image: EmbeddedImage, settings: MediaConfig) -> bytes:
    """Decode the safetensors file of an embedding.

    Blocks: for base64; call it off the event loop.

    Raises:
        RequestRefused: If it is too large or not base64.
    """
    return _decode_base64(
        image.data,
        0,
        settings.image_bytes_max,
        malformed=malformed,
        what="the embeddings are too large",
    )


def _decode_base64(
    text: str,
    start: int,
    bytes_max: int,
    *,
    malformed: Callable[[str], RequestRefused],
    what: str,
) -> bytes:
    # The decoded length follows from the encoded length, so an oversized image is refused without decoding.
    size = base64_bytes(text, start) // 4 * 3
    if size > (bytes_max + 2) * _ENCODED_RATIO_MAX:
        raise refuse_size(size, bytes_max, what)
    try:
        if size > bytes_max + 2:
            size = plain_base64_bytes(text, start) // 4 * 3  # line breaks do not count
        if size > bytes_max + 2:
            raise refuse_size(size, bytes_max, what)
        content = decode_base64(base64_of(text, start))
    except ValueError:
        raise malformed(_BASE64_FAULT) from None
    if len(content) > bytes_max:
        raise refuse_size(len(content), bytes_max, what)
    return content


def _file_refused() -> RequestRefused:
    # One message for "outside", "missing" and "not a file": a client learns nothing about the file system.
    message = (
        "the image file cannot be read. Remedy: name an existing file under the configured media directory, "
        "or send the image as a data: URL."
    )
    return RequestRefused(message, code="image_file_refused")


def _read_file(reference: str, settings: MediaConfig, reserve: Reserve) -> bytes:
    if not settings.directory:
        message = (
            "file: references are switched off: media.directory is empty. "
            "Remedy: send the image as a data: URL or set media.directory."
        )
        raise RequestRefused(message, code="image_file_refused")
    try:
        parts = urlsplit(reference)
        path = unquote(parts.path, errors="strict")
    except ValueError:
        raise _file_refused() from None
    if parts.netloc not in {"", "localhost"} or not path.startswith("/") or "\0" in path:
        raise _file_refused()
    root = os.path.realpath(settings.directory)
    resolved = os.path.realpath(path)
    if not _is_under(root, resolved):
        raise _file_refused()
    try:
        descriptor = os.open(resolved, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        raise _file_refused() from None
    try:
        # A directory in the path may have been replaced by a link since `realpath`, so the opened file is checked
        # again.
        opened = os.readlink(f"/proc/self/fd/{descriptor}")
        status = os.fstat(descriptor)
        if not _is_under(root, opened) or not stat.S_ISREG(status.st_mode):
            raise _file_refused()
        if status.st_size > settings.image_bytes_max:
            raise refuse_size(status.st_size, settings.image_bytes_max)
        reserve(status.st_size)
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(status.st_size + 1)
    except OSError:
        raise _file_refused() from None
    finally:
        os.close(descriptor)
    if len(content) > status.st_size:
        # It grew after the check, so its full size was not checked.
        raise _file_refused()
    return content


def _is_under(root: str, path: str) -> bool:
    return os.path.commonpath([root, path]) == root and path != root
