"""User-defined eviction policies, with orders that can be recorded, and that cannot."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from typing import Any

from vsched.policy import CachePolicy, EvictionOrder


class RingOrder:
    """Eviction order: the middle key first, new keys before keys held earlier."""

    def __init__(self) -> None:
        self.seen: dict[Hashable, bool] = {}
        self.ever: set[Hashable] = set()

    def add(self, key: Hashable, size: int) -> bool:
        self.seen[key] = key in self.ever
        self.ever.add(key)
        return True

    def reuse(self, key: Hashable) -> None:
        del self.seen[key]

    def drop(self, key: Hashable) -> None:
        del self.seen[key]

    def victim(self) -> Hashable:
        few = [key for key, seen in self.seen.items() if not seen] or list(self.seen)
        return few[len(few) // 2]

    def state(self) -> object:
        return {"seen": [*self.seen.items()], "ever": sorted(self.ever, key=repr)}

    def restore(self, state: Any) -> None:
        self.seen = dict(state["seen"])
        self.ever = {*state["ever"]}

    def __len__(self) -> int:
        return len(self.seen)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.seen)


class Ring(CachePolicy, frozen=True, kw_only=True):
    """Evicts from the middle."""

    def build_order(self) -> EvictionOrder[Hashable]:
        return RingOrder()


class LockedOrder(RingOrder):
    """Holds a lock, which cannot be recorded, from the first addition on."""

    def __init__(self) -> None:
        super().__init__()
        self.lock: Any = None

    def add(self, key: Hashable, size: int) -> bool:
        self.lock = threading.Lock()
        return super().add(key, size)

    def state(self) -> object:
        return [super().state(), self.lock]

    def restore(self, state: Any) -> None:
        super().restore(state[0])


class Locked(CachePolicy, frozen=True, kw_only=True):
    """Evicts from the middle, with a lock; with `early`, from the start."""

    early: bool = False

    def build_order(self) -> EvictionOrder[Hashable]:
        order = LockedOrder()
        if self.early:
            order.lock = threading.Lock()
        return order


class SilentOrder(RingOrder):
    """Has no snapshot of its state."""

    state = None  # type: ignore[assignment]


class Silent(CachePolicy, frozen=True, kw_only=True):
    """Evicts from the middle, with an order that cannot be recorded."""

    def build_order(self) -> EvictionOrder[Hashable]:
        return SilentOrder()
