"""Keep blocks on their second occurrence."""

from __future__ import annotations

import msgspec

from vsched.policy import CachePolicy, InsertionView

SLOTS = 2048
"""Number of remembered blocks, at a few bytes each."""
TAG_BYTES = 4


class Touched(msgspec.Struct):
    """Part of the hash of each block seen once, at a position derived from the hash."""

    tags: bytes = bytes(SLOTS * TAG_BYTES)


class SecondTouch(CachePolicy, frozen=True, kw_only=True):
    """Keeps blocks that have occurred before; on the first occurrence only a part of their hash is stored.

    So prompts that are never repeated take no memory from shared ones. In return a prefix is
    computed twice before it is cached. There are 2,048 places for hashes, and newer blocks
    overwrite older ones: a block that does not occur again within about as many blocks counts as
    new.

    Source: Einziger, Friedman and Manes, TinyLFU: A Highly Efficient Cache Admission Policy, ACM
    TOS 2017: its doorkeeper, with tags in place of a Bloom filter.

    Attributes:
        with_outputs: Whether output blocks are kept if the whole prompt is: the next conversation
            turn contains them.
    """

    state_type = Touched
    with_outputs: bool = True

    def keep(self, view: InsertionView) -> int:
        """Return the number of leading blocks seen before, cached ones included; all blocks if the whole prompt was."""
        touched: Touched = view.state
        tags = bytearray(touched.tags)
        known = view.found
        for index in range(view.found, view.prompt_blocks):
            block_hash = view.hashes[index]
            place = int.from_bytes(block_hash[:4], "little") % SLOTS * TAG_BYTES
            tag = block_hash[4 : 4 + TAG_BYTES]
            if known == index and tags[place : place + TAG_BYTES] == tag:
                known += 1
            tags[place : place + TAG_BYTES] = tag
        touched.tags = bytes(tags)
        if self.with_outputs and 0 < view.prompt_blocks <= known:
            return len(view.hashes)
        return known
