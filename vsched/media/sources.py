"""Read the image, video or embedding of one URL: `data:`, `file:` or, if allowed, `http(s):`.

References are untrusted. The length is checked before anything is decoded. A reference is never logged, and no error
message quotes it, or a path or an address derived from it.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import unquote, urlsplit

import pybase64

from vsched.errors import RequestRefused, limit_message, one_of
from vsched.media.embeddings import malformed
from vsched.media.fetch import Reserve, refuse_size, uncounted
from vsched.media.formats import IMAGE, MediaKind
from vsched.media.references import scheme_of

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from vsched.config.sections import MediaConfig

_HEADER_CHARACTERS_MAX = 256
_PIECE_BYTES = 1024 * 1024
"""Bytes decoded at a time, with the GIL held: 0.2 ms, a tenth of the standard library's time."""
_WHITESPACE = b"\t\n\f\r "
_WHITESPACE_RATIO_MAX = 1.05
"""Line breaks of base64: two characters for every 76, or fewer."""
_BASE64_FAULT = "its base64 is not valid; its alphabet has + and /, not - and _"


def is_local(reference: str) -> bool:
    """True if this reference can be read without the network."""
    return scheme_of(reference) not in {"http", "https"}


_FRAMES_HEADER = "data:video/jpeg;base64,"
_FRAMES_MAX = 1 << 16
"""Maximum number of URLs made from one: megabytes of commas would be gigabytes of URLs. The rest is in the last one."""


def frames_of(url: str) -> tuple[str, ...]:
    """Return the URLs of the frames in vLLM's `data:video/jpeg` URL, base64 with commas; empty for any other URL."""
    start = len(_FRAMES_HEADER)
    if url[:start].lower() != _FRAMES_HEADER:
        return ()
    return tuple(f"data:image/jpeg;base64,{part}" for part in url[start:].split(",", _FRAMES_MAX))


def read_local(
    reference: str,
    settings: MediaConfig,
    reserve: Reserve = uncounted,
    kind: MediaKind = IMAGE,
) -> bytes:
    """Read a `data:` or `file:` URL, or base64 of an embedding; `reserve` counts a file's bytes before they are read.

    Blocks: for base64 and the file system; call it off the event loop.

    Raises:
        RequestRefused: If the reference is malformed, not allowed, or too large.
    """
    scheme = scheme_of(reference)
    if scheme == "data":
        return _read_data(reference, settings, kind)
    if not scheme and kind.limited_as:
        limit = kind.bytes_max(settings)
        return _decode_base64(reference, 0, limit, malformed=malformed, kind=kind)
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
"""Signature of `fetch`."""


def _malformed(detail: str, kind: MediaKind = IMAGE) -> RequestRefused:
    form = f"data:{next(iter(kind.formats))};base64,<{kind.noun}>"
    message = f"the data: URL is malformed: {detail}. Remedy: send {form}."
    return RequestRefused(message, code=f"{kind.noun}_reference_invalid")


def _read_data(reference: str, settings: MediaConfig, kind: MediaKind) -> bytes:
    comma = reference.find(",", 0, _HEADER_CHARACTERS_MAX)
    header = reference[: max(comma, 0)].partition(":")[2].lower()
    media_type, *parameters = (part.strip() for part in header.split(";"))
    if parameters[-1:] != ["base64"]:
        raise _malformed("it has no ;base64, before the data", kind)
    # Without a media type, the first bytes of the file decide.
    if "/" in media_type and media_type not in kind.formats and media_type not in kind.aliases:
        message = limit_message(
            f"the {kind.noun}'s media type is not accepted",
            value="another type",
            limit=one_of(kind.formats),
            remedy=f"convert the {kind.noun} to one of these",
        )
        raise RequestRefused(message, code=f"{kind.noun}_type_unsupported")
    return _decode_base64(
        reference,
        comma + 1,
        kind.bytes_max(settings),
        malformed=lambda detail: _malformed(detail, kind),
        kind=kind,
    )


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
    if size > bytes_max * _WHITESPACE_RATIO_MAX + 2:
        raise refuse_size(size, bytes_max, kind)
    try:
        content = _decoded(text, start)
    except ValueError:
        raise malformed(_BASE64_FAULT) from None
    if len(content) > bytes_max:
        raise refuse_size(len(content), bytes_max, kind)
    return content


def _decoded(text: str, start: int) -> bytes:
    """Decode base64 from `start` on, in pieces, so that the event loop can run in between.

    It may contain whitespace and lack padding.

    Raises:
        ValueError: If it is invalid, empty or wrongly padded.
    """
    try:
        return _decode_pieces(_pieces(text, start))
    except ValueError:
        return _decode_pieces(piece.translate(None, _WHITESPACE) for piece in _pieces(text, start))


def _pieces(text: str, start: int) -> Iterator[bytes]:
    for at in range(start, len(text), _PIECE_BYTES):
        yield text[at : at + _PIECE_BYTES].encode("ascii")


def _decode_pieces(pieces: Iterable[bytes]) -> bytes:
    content = io.BytesIO()
    size = 0
    rest = b""
    for piece in pieces:
        size += len(piece)
        rest += piece
        whole = max(len(rest) - 1, 0) // 4 * 4  # the last four characters may be padded
        content.write(pybase64.b64decode(rest[:whole], validate=True))
        rest = rest[whole:]
    if b"=" not in rest:
        rest += b"=" * (-size % 4)
    content.write(pybase64.b64decode(rest, validate=True))
    # Padding in the middle of a piece makes its output too short.
    if not size or content.tell() != (size + 3) // 4 * 3 - rest.count(b"="):
        raise ValueError("empty or wrongly padded")
    return content.getvalue()


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
