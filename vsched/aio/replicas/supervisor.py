"""Restarts of a lost worker group: at once, then after increasing pauses, then never.

Each worker group has its own supervisor, so losses of one never delay another.
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
"""Pauses before restart attempts; after the last attempt the worker group is given up."""
LOSSES_WINDOW_S = 60.0
LOSSES_MAX = len(RESTART_DELAYS_S) + 1
"""Losses within the window skip the shorter pauses; after this many the worker group is given up."""
Reports = dict[str, list[Ready]]


class LastLoss(msgspec.Struct, frozen=True):
    """The last loss of a worker group; `at_s` is a Unix time."""

    failure: GroupFailure
    at_s: float


class Supervisor:
    """Restarts one worker group after each loss.

    `check(reports)` raises if the new ranks cannot be used. At the end of each restart `on_back` or
    `on_failed(failure)` is called once.

    Attributes:
        down: Whether the ranks are lost, or not in use yet.
        restarting: Whether an operator restarts them, and their groups are being drained for that.
        retired: Why they will not be restarted; None while they may be.
        restarts: Number of successful restarts.
        losses: Number of unplanned losses by kind of failure.
        last_loss: None before the first.
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
        self.down = self.restarting = False
        self.retired: GroupFailure | None = None
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
        """The groups of the worker group, for messages."""
        return " and ".join(self.worker_group.groups)

    def note_loss(self, failure: GroupFailure) -> None:
        """Count an unplanned loss; each in the window lengthens the next pause."""
        self.down = True
        self.last_loss = LastLoss(failure, time.time())
        self.losses[type(failure).__name__] += 1
        self._losses_s.append(self._loop.time())
        self._grace_s = 0.0

    def note_restart(self, failure: GroupFailure) -> None:
        """Note a planned restart: it does not count as a loss, and ranks get the grace period."""
        self.down = True
        self.last_loss = LastLoss(failure, time.time())
        self._grace_s = STOP_GRACE_S

    def revive(self) -> None:
        """Start retired ranks again and forget earlier losses, because an operator has intervened."""
        self.retired, self.down = None, True
        self._losses_s.clear()
        self.restart()

    def restart(self) -> None:
        """Start a restart, unless one is in progress: each of its groups may request it."""
        if self._task is None:
            self._settled.clear()
            self._task = self._loop.create_task(self._restart())

    async def wait_settled(self) -> None:
        """Wait until no restart is in progress, whether it succeeded or not.

        Blocks: up to all pauses and as many starts.
        """
        await self._settled.wait()

    async def end(self) -> None:
        """Cancel a restart in progress."""
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
            except Exception as error:  # noqa: BLE001 - the next attempt may succeed
                probe("supervisor.start_failed")
                logger.warning("%s did not come back: %s", self.names, error)
                failure = failure_of(error, groups)
                continue
            self.restarts += 1
            self.down = False
            logger.warning("%s: up again", self.names)
            self._finish()
            self._on_back()
            return
        # The last attempt may have left unusable ranks.
        await self.worker_group.stop(grace_s=0)
        probe("supervisor.given_up")
        logger.error("%s: could not be restarted", self.names)
        self.retired = failure
        self._finish()
        self._on_failed(failure)

    def _finish(self) -> None:
        """Reset the state before the callbacks, whose effects may lose the worker group and restart it again."""
        self._task = None
        self._settled.set()

    def _recent_losses(self) -> int:
        """Return the number of losses within the window."""
        since_s = self._loop.time() - LOSSES_WINDOW_S
        return sum(1 for lost_s in self._losses_s if lost_s >= since_s)
