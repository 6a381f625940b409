"""Hashes of KV blocks for the prefix cache; each covers its block and all blocks before it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from itertools import starmap
from struct import Struct

from vsched.types import MediaItem

_HASHER = blake2b(digest_size=16)
_PLACE = Struct("<qq")


def chain_hashes(
    tokens: array[int],
    items: Sequence[MediaItem],
    *,
    block_size: int,
    parent: bytes,
    start_block: int = 0,
) -> list[bytes]:
    """Return the hashes of the full blocks of `tokens` from `start_block` on.

    `parent` is the hash of the block before, or a root. The block where an item begins includes its digest, position
    and length, because all placeholders have the same token id; later blocks include them through the chain. It
    includes its metadata, kept rows and attention spans, too: the same frames at another time, or pruned otherwise,
    have other keys and values.
    """
    width = block_size * tokens.itemsize
    stop_block = len(tokens) // block_size
    data = memoryview(tokens)[start_block * block_size : stop_block * block_size].tobytes()
    beginning: dict[int, bytes] = {}
    for item in items:
        block, place = divmod(item.offset, block_size)
        at = (block - start_block) * width
        beginning[at] = beginning.get(at, b"") + b"".join(
            (item.key, _PLACE.pack(place, item.tokens), item.metadata, _ranges(item))
        )
    hashes: list[bytes] = []
    fresh = _HASHER.copy  # copying a hasher takes half as long as creating one
    for at in range(0, len(data), width):
        hasher = fresh()
        hasher.update(parent + data[at : at + width])
        if at in beginning:
            hasher.update(beginning[at])
        parent = hasher.digest()
        hashes.append(parent)
    return hashes


def _ranges(item: MediaItem) -> bytes:
    kept = b"".join(starmap(_PLACE.pack, item.kept))
    if item.attention is None:
        return kept
    spans = ((start - item.offset, stop - item.offset) for start, stop in item.attention)
    return kept + b"attention" + b"".join(starmap(_PLACE.pack, spans))


def root_hash(cache_salt: str, adapter: int = 0) -> bytes:
    """Return the parent of the first block of a sequence; different salts or adapters share nothing."""
    of_adapter = adapter.to_bytes(8, "little") if adapter else b""
    return blake2b(
        cache_salt.encode(), digest_size=16, salt=of_adapter, person=b"vsched.prefix"
    ).digest()


def choices_root(number: int) -> bytes:
    """Return the parent of blocks that only the choices of one request share; `number` is that of the first choice."""
    return blake2b(number.to_bytes(8, "little"), digest_size=16, person=b"vsched.answers").digest()
