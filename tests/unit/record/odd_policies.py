"""Policies of a user's with state of all kinds."""

from __future__ import annotations

import enum
import threading
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator

from vsched.policy import EvictionOrder, EvictionPolicy


class Colour(enum.IntEnum):
    RED = 1
    BLUE = 2


class Link:
    """A member of a ring."""

    __slots__ = ("__secret", "after", "before", "colour", "key")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.before: Link = self
        self.after: Link = self
        self.colour = Colour.RED
        self.__secret = (key, 1)

    @property
    def secret(self) -> tuple[Hashable, int]:
        return self.__secret


class RingOrder:
    """The key in the middle goes first: a ring of links, a dictionary into it, sets, and what it saw."""

    limit = 3

    def __init__(self) -> None:
        self.head = Link(None)
        self.links: OrderedDict[Hashable, Link] = OrderedDict()
        self.seen: deque[Hashable] = deque(maxlen=4)
        self.ever: set[Hashable] = set()
        self.frozen = frozenset({1, 2})
        self.me = self
        self.worth = float("inf")

    def add(self, key: Hashable, size: int) -> bool:
        link = self.links[key] = Link(key)
        if key in self.ever:
            link.colour = Colour.BLUE
        link.before, link.after = self.head.before, self.head
        link.before.after = link.after.before = link
        self.seen.append(key)
        self.ever.add(key)
        return True

    def reuse(self, key: Hashable) -> None:
        self.drop(key)

    def drop(self, key: Hashable) -> None:
        link = self.links.pop(key)
        link.before.after, link.after.before = link.after, link.before

    def victim(self) -> Hashable:
        red = [link for link in self.links.values() if link.colour is Colour.RED]
        few = red or list(self.links.values())
        return few[len(few) // 2].key

    def __len__(self) -> int:
        return len(self.links)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.links)


class Ring(EvictionPolicy, frozen=True, kw_only=True):
    """Evicts from the middle."""

    def build_order(self) -> EvictionOrder[Hashable]:
        return RingOrder()


class LockedOrder(RingOrder):
    """Holds what cannot be recorded, from the first addition on."""

    def add(self, key: Hashable, size: int) -> bool:
        self.lock = threading.Lock()
        return super().add(key, size)


class Locked(EvictionPolicy, frozen=True, kw_only=True):
    """Evicts from the middle, behind a lock; with `early`, from the start."""

    early: bool = False

    def build_order(self) -> EvictionOrder[Hashable]:
        order = LockedOrder()
        if self.early:
            order.lock = threading.Lock()
        return order


class Trap:
    """Says so when any of its code runs."""

    def __init__(self) -> None:
        raise AssertionError("code of the class ran")

    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError("code of the class ran")

    def __hash__(self) -> int:
        raise AssertionError("code of the class ran")

    @property
    def guarded(self) -> int:
        raise AssertionError("code of the class ran")

    @guarded.setter
    def guarded(self, value: int) -> None:
        raise AssertionError("code of the class ran")


class Hashed:
    """A key with code of its own."""

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return self is other
