"""Description of the machine of a measurement, and of other load on it."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from vsched.sim.cost.model import Machine
from vsched.worker.spec import usable_cores

STATISTICS = Path("/proc/stat")
PROCESSOR = Path("/proc/cpuinfo")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class OtherLoad:
    """Measures the mean number of cores kept busy by other programs, and by the host of a virtual machine."""

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        """Start; `pids` returns the processes that, with this one, do not count as others."""
        self._pids = pids
        self._began_s = self._all_s(), self._own_s(), os.times().elapsed

    @staticmethod
    def _all_s() -> float:
        """Return the seconds that all cores were busy, or withheld from this virtual machine."""
        try:
            user, nice, system, _idle, _wait, *rest = map(
                int, STATISTICS.read_text().split("\n", 1)[0].split()[1:9]
            )
        except (OSError, ValueError):
            return 0.0  # not Linux
        return (user + nice + system + sum(rest)) * TICK_S

    def _own_s(self) -> float:
        own = os.times()
        return sum(own[:4]) + sum(map(_process_s, self._pids()))  # with children that have ended

    def cores(self) -> float:
        """Return the mean number of cores since creation."""
        all_s, own_s, at_s = self._began_s
        spent_s = self._all_s() - all_s - (self._own_s() - own_s)
        return max(round(spent_s / max(os.times().elapsed - at_s, TICK_S), 2), 0.0)


def process_s(pid: int) -> float:
    """Return the CPU time of a process.

    Raises:
        OSError: When the process does not exist any more.
    """
    text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) * TICK_S


def _process_s(pid: int) -> float:
    try:
        return process_s(pid)
    except OSError:
        return 0.0


def describe_machine(*, others: float) -> Machine:
    """Describe the machine that figures depend on."""
    return Machine(
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
        processor=_processor(),
        cores=usable_cores(),
        others=others,
    )


def _processor() -> str:
    try:
        lines = PROCESSOR.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
