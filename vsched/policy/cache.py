"""Policies for the caches: eviction order, and insertion into the prefix cache."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from vsched.policy.base import Policy, PolicyKey, RequestView, decides
from vsched.policy.checks import check_index

# --- eviction ---------------------------------------------------------------------------------------------------------


Key = TypeVar("Key", bound=Hashable)


class EvictionOrder(Protocol[Key]):
    """The evictable entries of one cache, in eviction order.

    A key is the hash of a prefix block, or the key of a cached embedding. Only entries that are not in use are in the
    order, so every victim can be evicted immediately.
    """

    def add(self, key: Key, size: int) -> bool:
        """Add an entry that has just become evictable; return False to evict it immediately.

        `size` is 1 for a prefix block, and the number of pages for an embedding.
        """
        ...

    def reuse(self, key: Key) -> None:
        """Remove an entry because it is in use again (a cache hit)."""
        ...

    def drop(self, key: Key) -> None:
        """Remove an entry because it left the cache."""
        ...

    def victim(self) -> Key:
        """Return the next entry to evict, without removing it; only called if the order is not empty."""
        ...

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Key]: ...


@runtime_checkable
class RecordableOrder(Protocol):
    """Optional methods of an eviction order, needed to record a server for replay.

    If an order of a server lacks either method, the server runs without recording.
    """

    def state(self) -> object:
        """Return the state as plain values: None, numbers, strings, bytes, lists and dictionaries."""
        ...

    def restore(self, state: Any) -> None:
        """Restore a value that `state` returned, in which tuples have become lists; called on a new order."""
        ...


# --- insertion --------------------------------------------------------------------------------------------------------


class InsertionView(RequestView, frozen=True, kw_only=True):
    """Input of an insertion policy: a finished request and its KV blocks.

    Attributes:
        hashes: Hashes of its full computed blocks, from the start of the prompt. A hash stands for all tokens up to the
            end of its block, so a block can be reused only while all blocks before it are cached.
        prompt_blocks: Number of leading blocks in `hashes` with prompt tokens only.
        found: Number of leading blocks in `hashes` that it found in the cache when it started. They stay cached
            whatever the policy returns.
        block_tokens: Tokens per block.
        prompt_tokens: Tokens in its prompt.
        output_tokens: Tokens that it generated.
        items: Images in its prompt.
    """

    hashes: Sequence[bytes]
    prompt_blocks: int
    found: int
    block_tokens: int
    prompt_tokens: int
    output_tokens: int
    items: int = 0


def check_kept(returned: int, count: int) -> int:
    """Return the checked number of leading blocks to keep, up to `count`."""
    return check_index(returned, count + 1)


def default_kept(count: int) -> int:
    """Keep all blocks."""
    return count


# --- the policy --------------------------------------------------------------------------------------------------


class CachePolicy(Policy, frozen=True, kw_only=True):
    """Decides the eviction order of a cache, and the blocks of a finished request to keep.

    A subclass overrides the methods of the decisions that it makes.
    """

    @decides(
        "eviction",
        PolicyKey("encode.eviction", "lru", "Choice of the cached embeddings to evict."),
        PolicyKey("generate.eviction", "lru", "Choice of the cached prefix blocks to evict."),
        remembers=False,
    )
    def build_order(self) -> EvictionOrder[Hashable]:
        """Return a new, empty eviction order for one embedding cache or prefix cache.

        Called at startup for each cache.
        """
        raise NotImplementedError

    @decides(
        "insertion",
        PolicyKey(
            "generate.insertion",
            "everything",
            "Choice of the blocks of a finished request that the prefix cache keeps.",
        ),
        check=check_kept,
        default=default_kept,
    )
    def keep(self, view: InsertionView) -> int:
        """Return the number of leading blocks of `view.hashes` to keep in the prefix cache: 0 for none, all by default.

        Called at the end of a request, if it has full blocks that it did not find in the cache. Blocks that other
        requests use stay until these end.
        """
        return len(view.hashes)
