"""How a worker group that was lost comes back: at once, then after ever longer pauses, then not at all.

Every worker group has a supervisor of its own, so the losses of one never delay another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from vsched.aio.replicas.worker_group import STOP_GRACE_S, WorkerGroup
from vsched.errors import failure_of
from vsched.failures import GroupFailure, LostTooOften
from vsched.probes import probe
from vsched.wire import Ready

logger = logging.getLogger(__name__)
RESTART_DELAYS_S = (0.0, 1.0, 5.0, 15.0)
"""Pauses before attempts to bring a lost worker group back; after the last, it stays away."""
LOSSES_WINDOW_S = 60.0
LOSSES_MAX = len(RESTART_DELAYS_S) + 1
"""Losses within the window skip the shorter pauses; after this many the worker group is not brought back."""
Reports = dict[str, list[Ready]]


class LastLoss(msgspec.Struct, frozen=True):
    """The last time that a worker group went, and why; `at_s` counts from 1970."""

    failure: GroupFailure
    at_s: float


class Supervisor:
    """Brings one worker group back, as often as it is lost.

    `check(reports)` raises when ranks that are up cannot be used; `on_back` or `on_failed(failure)`
    is called once at the end of each restart.

    Attributes:
        restarts: How often the worker group came back.
        losses: How often it was lost by itself, by the kind of failure.
        last_loss: None while there was none.
    """

    def __init__(
        self,
        worker_group: WorkerGroup,
        *,
        check: Callable[[Reports], None],
        on_back: Callable[[], None],
        on_failed: Callable[[GroupFailure], None],
    ) -> None:
        self.worker_group = worker_group
        self.restarts = 0
        self.losses: Counter[str] = Counter()
        self.last_loss: LastLoss | None = None
        self._check = check
        self._on_back = on_back
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._losses_s: deque[float] = deque(maxlen=LOSSES_MAX)
        self._grace_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def names(self) -> str:
        """The groups of the worker group, for people."""
        return " and ".join(self.worker_group.groups)

    def note_loss(self, failure: GroupFailure) -> None:
        """The worker group is gone by itself: one more such loss in the window lengthens the next pause."""
        self.last_loss = LastLoss(failure, time.time())
        self.losses[type(failure).__name__] += 1
        self._losses_s.append(self._loop.time())
        self._grace_s = 0.0

    def note_restart(self, failure: GroupFailure) -> None:
        """The worker group is to be replaced on purpose: that is no loss, and its ranks may end by themselves."""
        self.last_loss = LastLoss(failure, time.time())
        self._grace_s = STOP_GRACE_S

    def reset_backoff(self) -> None:
        """Somebody has looked after the worker group: what was lost before counts no more."""
        self._losses_s.clear()

    def restart(self) -> None:
        """Bring the worker group back; once, though each of its groups may ask for it."""
        if self._task is None:
            self._settled.clear()
            self._task = self._loop.create_task(self._restart())

    async def wait_settled(self) -> None:
        """Wait until no restart is under way, however it ended.

        Blocks: up to all pauses and as many starts.
        """
        await self._settled.wait()

    async def end(self) -> None:
        """Give up a restart that is under way."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._settled.set()

    async def _restart(self) -> None:
        groups = tuple(self.worker_group.groups)
        failure: GroupFailure = LostTooOften(groups)
        for delay_s in RESTART_DELAYS_S[max(self._recent_losses(), 1) - 1 :]:
            await asyncio.sleep(delay_s)
            try:
                await self.worker_group.stop(grace_s=self._grace_s)
                self._check(await self.worker_group.start())
            except Exception as error:  # noqa: BLE001 - whatever it was, the next attempt may do
                probe("supervisor.start_failed")
                logger.warning("%s did not come back: %s", self.names, error)
                failure = failure_of(error, groups)
                continue
            self.restarts += 1
            logger.warning("%s: up again", self.names)
            self._finish()
            self._on_back()
            return
        # The last attempt may have left ranks that cannot be used.
        await self.worker_group.stop(grace_s=0)
        probe("supervisor.given_up")
        logger.error("%s: could not be restarted", self.names)
        self._finish()
        self._on_failed(failure)

    def _finish(self) -> None:
        """Before the callbacks: what they cause may lose the worker group again, and begin the next restart."""
        self._task = None
        self._settled.set()

    def _recent_losses(self) -> int:
        """Return how many losses, the last one included, came in quick succession."""
        since_s = self._loop.time() - LOSSES_WINDOW_S
        return sum(1 for lost_s in self._losses_s if lost_s >= since_s)
