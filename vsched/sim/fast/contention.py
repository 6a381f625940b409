"""Contention: processes that share the cores of one machine slow each other down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol


class SharedWork(Protocol):
    """A step or a job; an end announced with an earlier `incarnation` is void."""

    incarnation: int

    @property
    def process(self) -> object:
        """The process it runs in: work of the same process does not slow it down."""
        ...


class Contention:
    """Work in progress, and the end of each piece under the current load of the cores.

    When work begins or ends, the speed of all other work changes, and so do their ends: these are
    announced again.
    """

    def __init__(
        self, slowdowns: Sequence[float], announce: Callable[[SharedWork, int], None]
    ) -> None:
        """Use the slowdowns of `HostCost.contention`; `announce` is called with the end of each piece of work."""
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
        """Return the contention, or None if processes do not slow each other down."""
        return cls(slowdowns, announce) if slowdowns else None

    def enter(self, work: SharedWork, need_ns: int, now_ns: int) -> None:
        """Begin work that takes `need_ns` when alone."""
        self._advance(now_ns)
        self._left_ns[work] = need_ns
        self._processes[work.process] += 1
        self._change(now_ns, newcomer=work)

    def leave(self, work: SharedWork, now_ns: int) -> None:
        """End or withdraw work; no-op if it has already ended."""
        if work in self._left_ns:
            self._advance(now_ns)
            del self._left_ns[work]
            self._processes[work.process] -= 1
            if not self._processes[work.process]:
                del self._processes[work.process]
            self._change(now_ns)

    def _advance(self, now_ns: int) -> None:
        """Subtract the progress since the last change."""
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
        # beyond the measured range, processes share the cores equally
        return self._slowdowns[-1] * count / known
