"""Read the image, video or embedding of one URL: `data:`, `file:` or, if allowed, `http(s):`.

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
    decode_base64,
    percent_decode,
    plain_base64_bytes,
)
from vsched.media.embeddings import malformed
from vsched.media.fetch import Reserve, fetch, uncounted
from vsched.media.formats import IMAGE, MediaKind

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from vsched.config.sections import MediaConfig

_MEDIA_TYPE = re.compile(r"[!#$%&'*+.^_`|~\w-]+/[!#$%&'*+.^_`|~\w-]+", re.ASCII)
_BASE64_HEADER = re.compile(r"; *base64\Z", re.IGNORECASE)
_URL_EDGES = "".join(map(chr, range(ord(" ") + 1)))
"""Control characters and spaces, which browsers strip from both ends of a URL."""
_LINE_BREAKS = b"\t\n\r"
_ENCODED_RATIO_MAX = 3
"""Percent-encoding expands one character to three."""
_BASE64_FAULT = "its base64 is not valid; its alphabet has + and /, not - and _"


def refuse_size(size: int | str, limit: int, kind: MediaKind = IMAGE) -> RequestRefused:
    """Error for a file with too many bytes."""
    message = limit_message(
        f"the encoded {kind.noun} is too large",
        value=f"{size} bytes",
        limit=f"{limit} bytes",
        remedy=f"send a smaller {kind.noun} or raise media.{kind.limit}",
    )
    return RequestRefused(message, code=f"{kind.noun}_too_large", status=413)


def scheme_of(reference: str) -> str:
    """Scheme of a reference in lower case; empty if it has none."""
    head, colon, _ = reference.lstrip(_URL_EDGES)[:16].partition(":")
    return head.lower() if colon else ""


def is_local(reference: str) -> bool:
    """True if this reference can be read without the network."""
    return scheme_of(reference) not in {"http", "https"}


def is_data(reference: str) -> bool:
    """True if the reference contains the file itself."""
    return scheme_of(reference) == "data"


_FRAMES_HEADER = "data:video/jpeg;base64,"


def frames_of(url: str) -> tuple[str, ...]:
    """Return the URLs of the frames in vLLM's `data:video/jpeg` URL, base64 with commas; empty for any other URL."""
    start = len(_FRAMES_HEADER)
    if url[:start].lower() != _FRAMES_HEADER:
        return ()
    return tuple(f"data:image/jpeg;base64,{part}" for part in url[start:].split(","))


def read_local(
    reference: str,
    settings: MediaConfig,
    reserve: Reserve = uncounted,
    kind: MediaKind = IMAGE,
) -> bytes:
    """Read a `data:` or `file:` reference; `reserve` counts the bytes of a file before they are read.

    Blocks: for base64 and the file system; call it off the event loop.

    Raises:
        RequestRefused: If the reference is malformed, not allowed, or too large.
    """
    scheme = scheme_of(reference)
    if scheme == "data":
        return _read_data(reference, settings, kind)
    if scheme == "file":
        return _read_file(reference, settings, reserve, kind)
    message = limit_message(
        f"the {kind.noun} reference has an unknown scheme",
        value=scheme if scheme.isalnum() and scheme.isascii() else "none",
        limit="data:, file:, http: or https:",
        remedy=f"send the {kind.noun} as a data: URL",
    )
    raise RequestRefused(message, code=f"{kind.noun}_reference_invalid")


ReadRemote: TypeAlias = "Callable[[str, MediaConfig, Reserve, MediaKind], Awaitable[bytes]]"
"""Signature of `read_remote`."""


async def read_remote(
    reference: str,
    settings: MediaConfig,
    reserve: Reserve = uncounted,
    kind: MediaKind = IMAGE,
) -> bytes:
    """Read an `http(s):` reference; `reserve` counts the bytes as they arrive.

    Blocks: up to `settings.fetch_s`.

    Raises:
        RequestRefused: If the host is not allowed, the fetch fails, or the response is too large.
    """
    return await fetch(reference, settings, reserve, kind)


def _malformed(detail: str, kind: MediaKind = IMAGE) -> RequestRefused:
    form = f"data:{next(iter(kind.formats))};base64,<{kind.noun}>"
    message = f"the data: URL is malformed: {detail}. Remedy: send {form}."
    return RequestRefused(message, code=f"{kind.noun}_reference_invalid")


def _read_data(reference: str, settings: MediaConfig, kind: MediaKind) -> bytes:
    """Read a `data:` URL as browsers do: RFC 2397, and the Fetch standard's data: URL processor."""
    comma = reference.find(",")
    if comma < 0:
        raise _malformed("it has no comma", kind)
    header = reference[:comma].translate(dict.fromkeys(_LINE_BREAKS))
    header = header.partition(":")[2].strip(_URL_EDGES)
    is_base64 = _BASE64_HEADER.search(header) is not None
    media_type, *parameters = (part.strip(_URL_EDGES).lower() for part in header.split(";"))
    if "base64" in parameters and not is_base64:
        raise _malformed(";base64 must be last before the comma", kind)
    # Without a valid media type, the first bytes of the file decide.
    accepted = media_type in kind.formats or media_type in kind.aliases
    if _MEDIA_TYPE.fullmatch(media_type) and not accepted:
        message = limit_message(
            f"the {kind.noun}'s media type is not accepted",
            value="another type",
            limit=one_of(kind.formats),
            remedy=f"convert the {kind.noun} to one of these",
        )
        raise RequestRefused(message, code=f"{kind.noun}_type_unsupported")
    if is_base64:
        return _decode_base64(
            reference,
            comma + 1,
            kind.bytes_max(settings),
            malformed=lambda detail: _malformed(detail, kind),
            kind=kind,
        )
    return _percent_decode(reference, comma + 1, kind.bytes_max(settings), kind)


def _percent_decode(reference: str, start: int, bytes_max: int, kind: MediaKind) -> bytes:
    size = len(reference) - start
    if size > bytes_max * _ENCODED_RATIO_MAX:
        raise refuse_size(size // _ENCODED_RATIO_MAX, bytes_max, kind)
    try:
        content = percent_decode(reference.rstrip(_URL_EDGES), start)
    except ValueError:
        raise _malformed("it has characters that are not ASCII", kind) from None
    if len(content) > bytes_max:
        raise refuse_size(len(content), bytes_max, kind)
    if not content:
        raise _malformed(f"it holds no {kind.noun}", kind)
    return content


def read_embedded(source: str, settings: MediaConfig, reserve: Reserve, kind: MediaKind) -> bytes:
    """Read the safetensors file of an embedding: base64, or a reference as in `read_local`.

    Blocks: for base64 and the file system; call it off the event loop.

    Raises:
        RequestRefused: If it is malformed, not allowed, or too large.
    """
    if scheme_of(source):
        return read_local(source, settings, reserve, kind)
    return _decode_base64(source, 0, kind.bytes_max(settings), malformed=malformed, kind=kind)


def _decode_base64(
    text: str,
    start: int,
    bytes_max: int,
    *,
    malformed: Callable[[str], RequestRefused],
    kind: MediaKind = IMAGE,
) -> bytes:
    # The decoded length follows from the encoded length, so an oversized image is refused without decoding.
    size = (len(text) - start) // 4 * 3
    if size > (bytes_max + 2) * _ENCODED_RATIO_MAX:
        raise refuse_size(size, bytes_max, kind)
    try:
        if size > bytes_max + 2:
            size = plain_base64_bytes(text, start) // 4 * 3  # line breaks do not count
        if size > bytes_max + 2:
            raise refuse_size(size, bytes_max, kind)
        content = decode_base64(text, start)
    except ValueError:
        raise malformed(_BASE64_FAULT) from None
    if len(content) > bytes_max:
        raise refuse_size(len(content), bytes_max, kind)
    return content


def _file_refused(kind: MediaKind) -> RequestRefused:
    # One message for "outside", "missing" and "not a file": a client learns nothing about the file system.
    message = (
        f"the {kind.noun} file cannot be read. Remedy: name an existing file under the configured media directory, "
        f"or send the {kind.noun} as a data: URL."
    )
    return RequestRefused(message, code=f"{kind.noun}_file_refused")


def _read_file(reference: str, settings: MediaConfig, reserve: Reserve, kind: MediaKind) -> bytes:
    if not settings.directory:
        message = (
            "file: references are switched off: media.directory is empty. "
            f"Remedy: send the {kind.noun} as a data: URL or set media.directory."
        )
        raise RequestRefused(message, code=f"{kind.noun}_file_refused")
    try:
        parts = urlsplit(reference)
        path = unquote(parts.path, errors="strict")
    except ValueError:
        raise _file_refused(kind) from None
    if parts.netloc not in {"", "localhost"} or not path.startswith("/") or "\0" in path:
        raise _file_refused(kind)
    root = os.path.realpath(settings.directory)
    resolved = os.path.realpath(path)
    if not _is_under(root, resolved):
        raise _file_refused(kind)
    try:
        descriptor = os.open(resolved, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        raise _file_refused(kind) from None
    try:
        # A directory in the path may have been replaced by a link since `realpath`, so the opened file is checked
        # again.
        opened = os.readlink(f"/proc/self/fd/{descriptor}")
        status = os.fstat(descriptor)
        if not _is_under(root, opened) or not stat.S_ISREG(status.st_mode):
            raise _file_refused(kind)
        if status.st_size > (limit := kind.bytes_max(settings)):
            raise refuse_size(status.st_size, limit, kind)
        reserve(status.st_size)
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(status.st_size + 1)
    except OSError:
        raise _file_refused(kind) from None
    finally:
        os.close(descriptor)
    if len(content) > status.st_size:
        # It grew after the check, so its full size was not checked.
        raise _file_refused(kind)
    return content


def _is_under(root: str, path: str) -> bool:
    return os.path.commonpath([root, path]) == root and path != root
