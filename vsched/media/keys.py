"""The keys of items: equal content, equal key, in every process and on every host.

Each part carries its type and length, so that no two lists of parts give the same bytes, and each kind of item has a
personalisation of its own, so that an embedding never passes for an image.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

_KEY_BYTES: Final = 32
_IMAGE: Final = b"vsched.item.v1"
_EMBEDDING: Final = b"vsched.rows.v1"

Part = tuple[bytes, bytes | memoryview]


def item_key(*, settings_digest: bytes, cache_salt: str, encoded: bytes) -> bytes:
    """Return the 32-byte key of an image.

    What the encoder reads of it follows from the encoded bytes and the processor's settings.
    """
    return _digest(_IMAGE, [(b"P", settings_digest), (b"T", _text(cache_salt)), (b"I", encoded)])


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
    """Return the 32-byte key of an embedding that the client brought.

    `served` is the dtype, hidden size and levels that the rows are kept in; `dtype` and `shape` are as they came,
    `metadata` is that of the image's plan.
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
