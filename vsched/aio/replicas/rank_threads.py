"""Number of compute threads in use by each rank of a worker group."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from vsched.wire import ThreadsInUse

LASTS_S = 5.0
"""A change is logged only after this time, so that short-lived other programs cause no log lines."""

logger = logging.getLogger(__name__)


class RankThreads:
    """The last thread report of each rank of one start; a lasting change is logged once.

    Attributes:
        in_use: The last report of each rank.
    """

    def __init__(self, groups: Sequence[str]) -> None:
        self.in_use: dict[int, ThreadsInUse] = {}
        self._names = " and ".join(groups)
        self._logged: dict[int, int] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def take(self, rank: int, report: ThreadsInUse) -> None:
        """Take the report of a rank; groups in one process report the same number twice."""
        if report == self.in_use.get(rank):
            return
        self.in_use[rank] = report
        self._cancel(rank)
        if report.active != self._logged.setdefault(rank, report.total):
            loop = asyncio.get_running_loop()
            self._timers[rank] = loop.call_later(LASTS_S, self._log, rank, report)

    def close(self) -> None:
        """Stop logging."""
        for rank in list(self._timers):
            self._cancel(rank)

    def _cancel(self, rank: int) -> None:
        timer = self._timers.pop(rank, None)
        if timer is not None:
            timer.cancel()

    def _log(self, rank: int, report: ThreadsInUse) -> None:
        del self._timers[rank]
        self._logged[rank] = report.active
        who, active, total = f"{self._names} rank {rank}", report.active, report.total
        if active < total:
            why = "other programs keep the cores busy"
            logger.warning("%s computes with %d of %d threads: %s", who, active, total, why)
        else:
            logger.info("%s computes with all of its %d threads again", who, total)
