"""Processes that share the cores of one machine, and slow each other down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol


class SharedWork(Protocol):
    """A step or a job; an end that was announced with an earlier `incarnation` is void."""

    incarnation: int

    @property
    def process(self) -> object:
        """The process that it runs in: work of the same process does not slow it down."""
        ...


class Contention:
    """The work under way, and when each piece of it ends while the others take their share of the cores.

    Whenever work begins or ends, the speed of all other work changes, and with it their ends: these are announced anew.
    """

    def __init__(
        self, slowdowns: Sequence[float], announce: Callable[[SharedWork, int], None]
    ) -> None:
        """Prepare for times that are multiplied as `HostCost.contention` says; `announce` is told of ends."""
        assert slowdowns, "without contention there is nothing to count"
        self._slowdowns = slowdowns
        self._announce = announce
        self._left_ns: dict[SharedWork, float] = {}
        self._processes: Counter[object] = Counter()
        self._since_ns = 0
        self._slowdown = 1.0

    @classmethod
    def of(
        cls, slowdowns: Sequence[float], announce: Callable[[SharedWork, int], None]
    ) -> Contention | None:
        """Return the contention, or None where processes do not slow each other down."""
        return cls(slowdowns, announce) if slowdowns else None

    def enter(self, work: SharedWork, need_ns: int, now_ns: int) -> None:
        """Begin work that takes `need_ns` when it is alone."""
        self._advance(now_ns)
        self._left_ns[work] = need_ns
        self._processes[work.process] += 1
        self._change(now_ns, newcomer=work)

    def leave(self, work: SharedWork, now_ns: int) -> None:
        """End work, or take it away; nothing happens where it has ended already."""
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

    def _change(self, now_ns: int, newcomer: SharedWork | None = None) -> None:
        slowdown = self._slowdown_of(len(self._processes))
        late = list(self._left_ns) if slowdown != self._slowdown else [newcomer]
        self._slowdown = slowdown
        for work in late:
            if work is not None:
                work.incarnation += 1
                left_ns = max(self._left_ns[work], 0.0)
                self._announce(work, now_ns + round(left_ns * slowdown))

    def _slowdown_of(self, count: int) -> float:
        known = len(self._slowdowns)
        if count <= known:
            return self._slowdowns[max(count - 1, 0)]
        return self._slowdowns[-1] * count / known  # more than were measured take equal shares
