"""Timing of policy calls, by the clock of the host.

The kernel has no clock, and times may change its decisions only by events. So calls are timed from outside, and a
policy that exceeds its budget repeatedly is replaced by the default; in the kernel with an event, which a record
contains as well.

Time in which the thread waited for a core does not count: on a busy machine, or under a control group's quota, a fast
policy would be replaced because of other programs. Time in which a policy sleeps or waits for a file counts.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from vsched.errors import limit_message

logger = logging.getLogger(__name__)
LATEST_CALLS = 100
"""Slow calls count while they are among this many latest calls."""
Ask = Callable[[Any], Any]
"""A call of a policy: takes the view, returns the answer."""


class QueueClock:
    """The total time in ns that the thread which created it was runnable and waited for a core.

    Constant if the operating system keeps no such statistics.
    """

    def __init__(self) -> None:
        self._file = -1
        with contextlib.suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def __call__(self) -> int:
        """Return the time in ns."""
        return int(os.pread(self._file, 64, 0).split()[1]) if self._file >= 0 else 0

    def __del__(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)


class _SeatTimes:
    """Calls of one seat; `latest_slow` has the numbers of the latest slow calls."""

    __slots__ = ("calls", "latest_slow", "longest_ns", "reported", "slow", "total_ns")

    def __init__(self, slow_max: int) -> None:
        self.calls = self.total_ns = self.longest_ns = self.slow = 0
        self.reported = 1
        self.latest_slow: deque[int] = deque(maxlen=slow_max + 1)


class PolicyTimes:
    """Times the calls of policies by seat."""

    def __init__(
        self,
        *,
        budget_ms: float,
        slow_max: int,
        now_ns: Callable[[], int],
        replace: Callable[[str, str], object],
        queued_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        """Replace a policy once more than `slow_max` of its latest calls took over `budget_ms`; with 0, never.

        `replace` gets the name of the seat and the reason. `queued_ns` is a `QueueClock`.
        """
        self._budget_ns = int(budget_ms * 1e6)
        self._slow_max = slow_max
        self._now_ns = now_ns
        self._replace = replace
        self._queued_ns = queued_ns if budget_ms else lambda: 0
        self._seats: dict[str, _SeatTimes] = {}

    def watch(self, seat: str, ask: Ask) -> Ask:
        """Wrap a policy call with a timer."""
        self._seats[seat] = times = _SeatTimes(self._slow_max)
        now_ns, queued_ns = self._now_ns, self._queued_ns
        budget_ns = self._budget_ns or 1 << 62

        def timed(view: Any) -> Any:
            queued_before_ns, started_ns = queued_ns(), now_ns()
            try:
                return ask(view)
            finally:
                took_ns = now_ns() - started_ns
                times.calls += 1
                times.total_ns += took_ns
                if took_ns > times.longest_ns:
                    times.longest_ns = took_ns
                if (
                    took_ns > budget_ns
                    and (took_ns := took_ns - queued_ns() + queued_before_ns) > budget_ns
                ):
                    self._note_slow(seat, times, took_ns)

        return timed

    def _note_slow(self, seat: str, times: _SeatTimes, took_ns: int) -> None:
        """Count a slow call, and log the first, second, fourth and so on, so that they do not flood the log."""
        times.slow += 1
        times.latest_slow.append(times.calls)
        message = limit_message(
            f"{seat}: the policy was slow, {times.slow} of {times.calls} calls so far",
            value=f"{took_ns / 1e6:.1f} ms",
            limit=f"{self._budget_ns / 1e6:g} ms",
            remedy="make it faster, or raise policies.call_budget_ms",
        )
        if times.slow >= times.reported:
            times.reported *= 2
            logger.warning("%s", message)
        latest = times.latest_slow
        if len(latest) > self._slow_max and times.calls - latest[0] < LATEST_CALLS:
            latest.clear()
            self._replace(seat, message)

    def statistics(self) -> dict[str, dict[str, float]]:
        """Return for each seat the number of calls, their total and longest time, and the number of slow calls."""
        return {
            seat: {
                "calls": times.calls,
                "seconds": times.total_ns / 1e9,
                "longest_ms": times.longest_ns / 1e6,
                "slow": times.slow,
            }
            for seat, times in self._seats.items()
        }
