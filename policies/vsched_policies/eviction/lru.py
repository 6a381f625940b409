"""Least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic

from vsched.policy import CachePolicy, EvictionOrder, Key


class Lru(CachePolicy, frozen=True, kw_only=True):
    """Evicts the entry that has been unused for longest."""

    def build_order(self) -> EvictionOrder[Hashable]:
        """Return an empty order."""
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

    def drop(self, key: Key) -> None:
        del self._keys[key]

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
