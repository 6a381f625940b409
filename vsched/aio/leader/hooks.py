"""Schedule of the periodic collective work of a group."""

from __future__ import annotations

from collections.abc import Mapping

HOOK_GAP_S = 1.0
"""Minimum time between runs of a hook on request of ranks, so that it is not part of every step."""


class HookTimes:
    """The hooks of one group.

    A hook is due when its interval has passed since its last run and there were steps in between, because nothing
    changes while a group is idle, or when a rank requests it; with an interval of 0 only then. `override_s` replaces
    all other intervals.
    """

    def __init__(
        self, intervals: Mapping[str, float], now_s: float, *, override_s: float | None = None
    ) -> None:
        self._intervals = {
            name: interval_s if override_s is None or interval_s == 0 else override_s
            for name, interval_s in intervals.items()
        }
        self._start_s = now_s
        self._ended_s: dict[str, float] = {}
        self._worked: set[str] = set()
        self._requested: set[str] = set()
        self._out: set[str] = set()

    def stepped(self) -> None:
        """Note that a step was sent."""
        self._worked.update(self._intervals)

    def ask(self, name: str) -> bool:
        """Request a hook; return False if there is none of this name."""
        if name not in self._intervals:
            return False
        if name not in self._out:  # a run in progress satisfies the request
            self._requested.add(name)
        return True

    def take_due(self, now_s: float) -> list[str]:
        """Return the hooks to run now; they count as running until `done`."""
        due = [name for name in self._intervals if self._is_due(name, now_s)]
        for name in due:
            self._requested.discard(name)
            self._out.add(name)
            self._worked.discard(name)
        return due

    def _is_due(self, name: str, now_s: float) -> bool:
        if name in self._out:
            return False
        ended_s = self._ended_s.get(name)
        if name in self._requested and (ended_s is None or now_s - ended_s >= HOOK_GAP_S):
            return True
        interval_s = self._intervals[name]
        if interval_s == 0 or name not in self._worked:
            return False
        return now_s - (self._start_s if ended_s is None else ended_s) >= interval_s

    def done(self, name: str, now_s: float) -> None:
        """Note the end of a run."""
        self._out.discard(name)
        self._ended_s[name] = now_s
