"""No cache."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic

from vsched.policy import CachePolicy, EvictionOrder, Key


class KeepNothing(CachePolicy, frozen=True, kw_only=True):
    """Keeps nothing: an entry is evicted when no request uses it, so that only concurrent requests share it."""

    def build_order(self) -> EvictionOrder[Hashable]:
        """Return an order that accepts no entries."""
        return EmptyOrder[Hashable]()


class EmptyOrder(Generic[Key]):
    """Rejects every entry, so it never has one to reuse, drop or evict."""

    def add(self, key: Key, size: int) -> bool:
        return False

    def reuse(self, key: Key) -> None:
        raise KeyError(key)

    def drop(self, key: Key) -> None:
        raise KeyError(key)

    def victim(self) -> Key:
        raise IndexError("nothing is evictable")

    def state(self) -> None:
        return None

    def restore(self, state: None) -> None:
        pass

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Key]:
        return iter(())
