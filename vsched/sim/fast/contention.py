"""Processes that share the cores of one machine, and slow each other down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol


class Work(Protocol):
    """What can be at work; an end that was announced with an earlier `life` never comes."""

    life: int

    @property
    def process(self) -> object:
        """What it is a part of: the company of its own process slows nothing down."""
        ...


class Crowd:
    """Knows who is at work, and when each will be done at the pace that so many leave each other.

    Whenever one begins or ends, the pace of all others changes, and with it their ends: these are announced anew.
    """

    def __init__(self, crowding: Sequence[float], announce: Callable[[Work, int], None]) -> None:
        """Prepare for times that are multiplied as `HostCost.crowding` says; `announce` is told of ends."""
        assert crowding, "without crowding nobody need be counted"
        self._crowding = crowding
        self._announce = announce
        self._left_ns: dict[Work, float] = {}
        self._processes: Counter[object] = Counter()
        self._since_ns = 0
        self._slowdown = 1.0

    @classmethod
    def of(cls, crowding: Sequence[float], announce: Callable[[Work, int], None]) -> Crowd | None:
        """Return a crowd, or None where nobody slows anybody down."""
        return cls(crowding, announce) if crowding else None

    def enter(self, work: Work, need_ns: int, now_ns: int) -> None:
        """Somebody begins to work, and needs so long when alone."""
        self._advance(now_ns)
        self._left_ns[work] = need_ns
        self._processes[work.process] += 1
        self._change(now_ns, newcomer=work)

    def leave(self, work: Work, now_ns: int) -> None:
        """Somebody is done, or gone; nothing happens where that was known."""
        if work in self._left_ns:
            self._advance(now_ns)
            del self._left_ns[work]
            self._processes[work.process] -= 1
            if not self._processes[work.process]:
                del self._processes[work.process]
            self._change(now_ns)

    def _advance(self, now_ns: int) -> None:
        """Take off what has been done since the last change."""
        done_ns = (now_ns - self._since_ns) / self._slowdown
        self._since_ns = now_ns
        for work in self._left_ns:
            self._left_ns[work] -= done_ns

    def _change(self, now_ns: int, newcomer: Work | None = None) -> None:
        slowdown = self._slowdown_of(len(self._processes))
        late = list(self._left_ns) if slowdown != self._slowdown else [newcomer]
        self._slowdown = slowdown
        for work in late:
            if work is not None:
                work.life += 1
                left_ns = max(self._left_ns[work], 0.0)
                self._announce(work, now_ns + round(left_ns * slowdown))

    def _slowdown_of(self, count: int) -> float:
        known = len(self._crowding)
        if count <= known:
            return self._crowding[max(count - 1, 0)]
        return self._crowding[-1] * count / known  # whoever comes on top takes an equal share
