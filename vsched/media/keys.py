"""Cache keys of images: equal content has an equal key, in every process and on every host.

Each part is prefixed with its type and length, so that different lists of parts never yield the same bytes. Images and
embeddings use different personalizations, so that an embedding never matches an image.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

_KEY_BYTES: Final = 32
_IMAGE: Final = b"vsched.item.v1"
_EMBEDDING: Final = b"vsched.rows.v1"
_VIDEO: Final = b"vsched.group.v1"

Part = tuple[bytes, bytes | memoryview]


def item_key(*, settings_digest: bytes, cache_salt: str, encoded: bytes) -> bytes:
    """32-byte key of an image.

    The encoder's input depends only on the encoded bytes and the processor's settings.
    """
    return _digest(_IMAGE, [(b"P", settings_digest), (b"T", _text(cache_salt)), (b"I", encoded)])


def video_key(
    *, settings_digest: bytes, cache_salt: str, options: bytes, encoded: Sequence[bytes]
) -> bytes:
    """32-byte key of a video with these options: of the file, or of the files of its frames."""
    parts: list[Part] = [(b"P", settings_digest), (b"T", _text(cache_salt)), (b"O", options)]
    return _digest(_VIDEO, [*parts, *((b"I", each) for each in encoded)])


def group_key(video: bytes, index: int) -> bytes:
    """32-byte key of the extent of a frame group while its content is unknown."""
    return _digest(_VIDEO, [(b"V", video), (b"N", _integers((index,)))])


def content_key(
    *, settings_digest: bytes, cache_salt: str, specs: bytes, arrays: Sequence[memoryview]
) -> bytes:
    """32-byte key of a frame group by its arrays; `specs` are their names, types and shapes, and its tokens."""
    parts: list[Part] = [(b"P", settings_digest), (b"T", _text(cache_salt)), (b"S", specs)]
    return _digest(_VIDEO, [*parts, *((b"R", each) for each in arrays)])


def embedding_key(
    *,
    settings_digest: bytes,
    cache_salt: str,
    served: tuple[str, int, int],
    dtype: str,
    shape: Sequence[int],
    metadata: bytes,
    rows: memoryview,
) -> bytes:
    """32-byte key of an embedding from a client.

    `served` is the dtype, hidden size and levels in which the rows are stored; `dtype` and `shape` are those of the
    file, and `metadata` is that of the image's plan.
    """
    served_dtype, hidden_size, levels = served
    return _digest(
        _EMBEDDING,
        [
            (b"P", settings_digest),
            (b"T", _text(cache_salt)),
            (b"M", served_dtype.encode()),
            (b"H", _integers((hidden_size, levels))),
            (b"D", dtype.encode()),
            (b"S", _integers(shape)),
            (b"G", metadata),
            (b"R", rows),
        ],
    )


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _integers(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def _digest(person: bytes, parts: Sequence[Part]) -> bytes:
    digest = hashlib.blake2b(digest_size=_KEY_BYTES, person=person)
    for kind, part in parts:
        digest.update(kind + len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
