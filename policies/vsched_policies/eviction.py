"""Eviction policies: the order in which cached embeddings or prefix blocks are evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Any, Generic

from vsched.policy import CachePolicy, Count, EvictionOrder, Fraction, Key


class Lru(CachePolicy, frozen=True, kw_only=True):
    """Evicts the entry that has been unused for longest."""

    def build_order(self) -> EvictionOrder[Hashable]:
        return LruOrder[Hashable]()


class LruOrder(Generic[Key]):
    """Entries by the time of their release, oldest first.

    An OrderedDict, because finding the first key of a plain dict slows down with every key removed
    in front of it.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def add(self, key: Key, size: int) -> bool:
        assert key not in self._keys, f"{key!r} is evictable already"
        self._keys[key] = None
        return True

    def reuse(self, key: Key) -> None:
        del self._keys[key]

    drop = reuse

    def victim(self) -> Key:
        return next(iter(self._keys))

    def state(self) -> list[Key]:
        return list(self._keys)

    def restore(self, state: list[Key]) -> None:
        self._keys = OrderedDict.fromkeys(state)

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)


class KeepNothing(CachePolicy, frozen=True, kw_only=True):
    """Keeps nothing: an entry is evicted when no request uses it, so that only concurrent requests share it."""

    def build_order(self) -> EvictionOrder[Hashable]:
        return EmptyOrder[Hashable]()


class EmptyOrder(LruOrder[Key]):
    """Rejects every entry."""

    def add(self, key: Key, size: int) -> bool:
        return False


HITS_MAX = 3
IN_USE_MAX = 1 << 16
"""Maximum number of entries in use whose hits are stored: a cache does not report entries lost while in use."""


class S3Fifo(CachePolicy, frozen=True, kw_only=True):
    """Evicts new entries without hits first, then the others in FIFO order, each spared once for every hit.

    New entries pass a small queue. At its end, entries with hits move to the main queue and the
    others are evicted, with their keys remembered as ghosts: a ghost that returns goes directly to
    the main queue. So a thousand images seen once cannot displace images that are seen repeatedly.

    Source: "FIFO queues are all you need for cache eviction", SOSP 2023. It differs as the contract
    requires: an entry in use is in no queue, so it returns to the end of the queue that it left.

    Attributes:
        small_share: Maximum share of the evictable bytes in the small queue; above it, entries are
            evicted from there.
        ghosts: Maximum number of keys remembered after eviction.
    """

    small_share: Fraction = 0.1
    ghosts: Count = 1024

    def build_order(self) -> EvictionOrder[Hashable]:
        return S3FifoOrder[Hashable](self.small_share, self.ghosts)


class S3FifoOrder(Generic[Key]):
    """Two queues of evictable keys, oldest first, and records of keys that are in neither."""

    def __init__(self, small_share: float, ghosts_max: int) -> None:
        self._small_share = small_share
        self._ghosts_max = ghosts_max
        self._small: OrderedDict[Key, int] = OrderedDict()
        self._main: OrderedDict[Key, int] = OrderedDict()
        self._sizes: dict[Key, int] = {}
        self._small_size = 0
        self._size = 0
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        self._in_use: OrderedDict[Key, tuple[bool, int]] = OrderedDict()

    def add(self, key: Key, size: int) -> bool:
        assert key not in self._sizes, f"{key!r} is evictable already"
        in_main, hits = self._in_use.pop(key, (key in self._ghosts, 0))
        self._ghosts.pop(key, None)
        self._sizes[key] = size
        self._size += size
        if in_main:
            self._main[key] = hits
        else:
            self._small[key] = hits
            self._small_size += size
        return True

    def reuse(self, key: Key) -> None:
        in_main, hits = self._remove(key)
        self._in_use[key] = (in_main, min(hits + 1, HITS_MAX))
        if len(self._in_use) > IN_USE_MAX:
            self._in_use.popitem(last=False)

    def drop(self, key: Key) -> None:
        in_main, _ = self._remove(key)
        if not in_main:
            self._ghosts[key] = None
            if len(self._ghosts) > self._ghosts_max:
                self._ghosts.popitem(last=False)

    def victim(self) -> Key:
        # Moving entries here does not change the result: a second call returns the same key.
        while True:
            full = self._small_size > self._small_share * self._size
            if self._small and (full or not self._main):
                key, hits = next(iter(self._small.items()))
                if not hits:
                    return key
                del self._small[key]
                self._small_size -= self._sizes[key]
                self._main[key] = 0
            else:
                key, hits = next(iter(self._main.items()))
                if not hits:
                    return key
                self._main[key] = hits - 1
                self._main.move_to_end(key)

    def _remove(self, key: Key) -> tuple[bool, int]:
        """Remove a key from its queue; return whether that was the main one, and its hits."""
        size = self._sizes.pop(key)
        self._size -= size
        if key in self._main:
            return True, self._main.pop(key)
        self._small_size -= size
        return False, self._small.pop(key)

    def state(self) -> list[list[Any]]:
        return [
            [(key, hits, self._sizes[key]) for key, hits in self._small.items()],
            [(key, hits, self._sizes[key]) for key, hits in self._main.items()],
            list(self._ghosts),
            [(key, in_main, hits) for key, (in_main, hits) in self._in_use.items()],
        ]

    def restore(self, state: list[list[Any]]) -> None:
        small, main, ghosts, in_use = state
        self._small = OrderedDict((key, hits) for key, hits, _ in small)
        self._main = OrderedDict((key, hits) for key, hits, _ in main)
        self._sizes = {key: size for key, _, size in [*small, *main]}
        self._small_size = sum(size for _, _, size in small)
        self._size = sum(self._sizes.values())
        self._ghosts = OrderedDict.fromkeys(ghosts)
        self._in_use = OrderedDict((key, (in_main, hits)) for key, in_main, hits in in_use)

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[Key]:
        yield from self._small
        yield from self._main
