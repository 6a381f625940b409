"""Policies about the caches: eviction order, and insertion into the prefix cache."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec

from vsched.policy.base import Policy
from vsched.policy.measured import NOTHING_MEASURED, Measured

# --- eviction ---------------------------------------------------------------------------------------------------------


Key = TypeVar("Key", bound=Hashable)


class EvictionOrder(Protocol[Key]):
    """The evictable entries of one cache, in the order that a policy wants them gone.

    Only entries that are not in use are in it, so whatever `victim` names may go at once.
    """

    def add(self, key: Key, size: int) -> bool:
        """Take an entry that has just become evictable; False drops it from the cache at once."""
        ...

    def reuse(self, key: Key) -> None:
        """Forget an entry because it is in use again (a hit)."""
        ...

    def drop(self, key: Key) -> None:
        """Forget an entry because it left the cache."""
        ...

    def victim(self) -> Key:
        """Name the next entry to go, without removing it; the order is not empty."""
        ...

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Key]: ...


@runtime_checkable
class RecordableOrder(Protocol):
    """What an eviction order adds so that a record of the server can be replayed.

    A server whose orders have not both methods serves, and records nothing.
    """

    def state(self) -> object:
        """Return what the order remembers as plain values: None, numbers, text, bytes, lists and dictionaries."""
        ...

    def restore(self, state: Any) -> None:
        """Take over what `state` returned; called on a fresh order. Tuples have become lists."""
        ...


# --- insertion --------------------------------------------------------------------------------------------------------


class InsertionView(msgspec.Struct, frozen=True, kw_only=True):
    """What an insertion policy sees of a request that ended and leaves KV blocks behind.

    Attributes:
        hashes: Of its full blocks that are computed, prompt first. A hash stands for all tokens up to the end of its
            block, so a block is of use only while those before it are cached.
        prompt_blocks: How many of them hold nothing but its prompt.
        found: How many of them it found in the cache when it began. They stay whatever the answer.
        block_tokens: Tokens of a block.
        items: Images in its prompt.
        measured: Times of this replica, and what its cache holds.
        state: What the policy remembers, to be changed in place.
    """

    now_ns: int
    hashes: Sequence[bytes]
    prompt_blocks: int
    found: int
    block_tokens: int
    prompt_tokens: int
    output_tokens: int
    items: int = 0
    priority: int = 0
    tenant: str = ""
    measured: Measured = NOTHING_MEASURED
    state: Any = None


# --- the policy --------------------------------------------------------------------------------------------------


class CachePolicy(Policy, frozen=True, kw_only=True):
    """Decides about a cache: which entries leave it first, and which blocks of a finished request it keeps.

    A subclass overrides the methods of the decisions that it makes.
    """

    def build_order(self) -> EvictionOrder[Hashable]:
        """Return a new, empty eviction order for one cache of embeddings or of prefix blocks."""
        raise NotImplementedError

    def keep(self, view: InsertionView) -> int:
        """Return the number of leading blocks of a finished request to keep in the prefix cache.

        Called if the request has blocks that it did not find in the cache. Blocks that other requests use stay until
        those end.
        """
        return len(view.hashes)
