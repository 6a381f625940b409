"""User-defined eviction policies, with orders that can be recorded, and that cannot."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterator
from typing import Any

from vsched.policy import CachePolicy, EvictionOrder


class Link:
    """A member of a ring."""

    __slots__ = ("after", "before", "key", "seen")

    def __init__(self, key: Hashable, *, seen: bool = False) -> None:
        self.key = key
        self.seen = seen
        self.before: Link = self
        self.after: Link = self


class RingOrder:
    """Evicts the middle key first, new keys before existing ones."""

    def __init__(self) -> None:
        self.head = Link(None)
        self.links: dict[Hashable, Link] = {}
        self.recent: deque[Hashable] = deque(maxlen=4)
        self.ever: set[Hashable] = set()

    def add(self, key: Hashable, size: int) -> bool:
        self._append(Link(key, seen=key in self.ever))
        self.recent.append(key)
        self.ever.add(key)
        return True

    def _append(self, link: Link) -> None:
        self.links[link.key] = link
        link.before, link.after = self.head.before, self.head
        link.before.after = link.after.before = link

    def reuse(self, key: Hashable) -> None:
        self.drop(key)

    def drop(self, key: Hashable) -> None:
        link = self.links.pop(key)
        link.before.after, link.after.before = link.after, link.before

    def victim(self) -> Hashable:
        new = [link for link in self.links.values() if not link.seen]
        few = new or list(self.links.values())
        return few[len(few) // 2].key

    def state(self) -> object:
        links = [(link.key, link.seen) for link in self.links.values()]
        return {"links": links, "recent": list(self.recent), "ever": sorted(self.ever, key=repr)}

    def restore(self, state: Any) -> None:
        for key, seen in state["links"]:
            self._append(Link(key, seen=seen))
        self.recent.extend(state["recent"])
        self.ever.update(state["ever"])

    def __len__(self) -> int:
        return len(self.links)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.links)


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
