"""Keep what comes a second time."""

from __future__ import annotations

import msgspec

from vsched.policy import InsertionPolicy, InsertionView

SLOTS = 2048
"""Blocks that are remembered at a time, a few bytes each."""
TAG_BYTES = 4


class Touched(msgspec.Struct):
    """A part of the hash of each block that came once, at a place that follows from the hash."""

    tags: bytes = bytes(SLOTS * TAG_BYTES)


class SecondTouch(InsertionPolicy, frozen=True, kw_only=True):
    """Keeps blocks that have come before: what comes once is only remembered, by a part of its hash.

    So prompts that nobody sends again take no place from those that many share. In return a prefix is computed twice
    before it is cached. A newer block takes the place of an older one in the memory, of which there are 2,048: what
    does not come again within about as many blocks counts as new.

    Source: Einziger, Friedman and Manes, TinyLFU: A Highly Efficient Cache Admission Policy, ACM TOS 2017: its
    doorkeeper, with tags in place of a Bloom filter.

    Attributes:
        with_answers: Whether blocks of answers are kept with a prompt that is: what follows in a conversation has them.
    """

    state_type = Touched
    with_answers: bool = True

    def keep(self, view: InsertionView) -> int:
        """Return the blocks that came before, with those found; all where that is the whole prompt."""
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
        if self.with_answers and 0 < view.prompt_blocks <= known:
            return len(view.hashes)
        return known
