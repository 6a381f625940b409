"""Administration of single groups while the others serve: drain, restart and resume.

A group is drained for maintenance of its device, for example, and resumed afterwards. A restart drains all groups of
the worker group, then replaces its ranks. The last group of a stage that is up can be restarted, because its requests
wait for its return, but not drained: they would wait for an operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from vsched.aio.replicas.groups import ServedGroup, ServedGroups
from vsched.errors import RequestRefused
from vsched.failures import RestartedByOperator
from vsched.kernel.events import Drain, Event, GroupLost, Resume
from vsched.probes import probe

logger = logging.getLogger(__name__)


class GroupAdministration:
    """Drains, restarts and resumes groups; `drain_s` limits the time of each drain."""

    def __init__(
        self, groups: ServedGroups, handle: Callable[[Event], None], *, drain_s: float
    ) -> None:
        self._groups = groups
        self._handle = handle
        self._drain_s = drain_s

    async def drain(self, name: str) -> bool:
        """Give a group no new requests, and wait until it is idle; return True if that happened in time.

        Blocks: up to the deadline for draining; the group continues to drain afterwards.

        Raises:
            RequestRefused: When there is no such group, it is not up, or it is the last of its stage that is up.
        """
        group = self._known(name)
        self._check_state(group, "drain", "up", "draining")
        others = [one for one in self._groups.of_stage(group.stage) if one.state == "up"]
        if others == [group]:
            raise _refused(
                f"{name} is the last {group.stage} group that is up, and requests would wait for an operator",
                code="last_group",
                remedy="restart it, or bring another one up before",
            )
        self._begin_drain(group)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                await group.drained.wait()
        return group.drain_wanted and group.drained.is_set()  # it may have been resumed

    async def restart(self, name: str) -> bool:
        """Replace the ranks of a group after it is drained, or after the deadline; return True if it is up again.

        Requests that still run then continue after the restart, as after any loss. A retired group starts again.

        Blocks: up to the deadline for draining, then as long as a worker group may take to restart.

        Raises:
            RequestRefused: When there is no such group, or it is restarting already.
        """
        supervisor = self._known(name).supervisor
        groups = self._groups.supervised_by(supervisor)
        for group in groups:
            self._check_state(group, "restart", "up", "draining", "retired")
        if groups[0].retired:
            for group in groups:
                group.retired, group.down, group.drain_wanted = None, True, False
            supervisor.reset_backoff()
            supervisor.restart()
            await supervisor.wait_settled()
            return all(group.state == "up" for group in groups)
        await self._drain_all(groups)
        if any(group.down or group.retired for group in groups):
            probe("administration.lost_while_restarting")
        else:
            failure = RestartedByOperator(tuple(group.name for group in groups))
            supervisor.note_restart(failure)
            for group in groups:
                group.down = True
            for group in groups:
                self._handle(GroupLost(group.name, failure, planned=True))
        await supervisor.wait_settled()
        return all(group.state == "up" for group in groups)

    async def _drain_all(self, groups: list[ServedGroup]) -> None:
        """Drain all groups of a worker group within the deadline; the encoder last, since running requests need it."""
        for group in groups:
            group.restarting = True
        try:
            async with asyncio.timeout(self._drain_s):
                for group in sorted(groups, key=lambda one: one.stage == "encode"):
                    self._begin_drain(group)
                    await group.drained.wait()
        except TimeoutError:
            probe("administration.drain_deadline")
            names = [group.name for group in groups]
            logger.warning("%s: not drained in %g s, restarted now", names, self._drain_s)
        except BaseException:
            for group in groups:
                self._end_drain(group)
            raise
        finally:
            for group in groups:
                group.restarting = False
        for group in groups:
            group.drain_wanted = False  # it takes requests after the restart

    def resume(self, name: str) -> None:
        """Give requests to a drained or draining group again.

        Raises:
            RequestRefused: When there is no such group, or it was not drained.
        """
        group = self._known(name)
        if not group.drain_wanted or group.restarting or group.retired:
            self._check_state(group, "resume", "draining")
        if not group.drained.is_set():
            probe("administration.resumed_while_draining")
        self._end_drain(group)

    def back(self, group: ServedGroup) -> None:
        """Handle the return of a lost group; a group that is to be drained continues to drain."""
        if group.drain_wanted:
            probe("administration.drain_outlives_loss")
            self._handle(Drain(group.name))

    def _known(self, name: str) -> ServedGroup:
        if name not in self._groups:
            known = ", ".join(self._groups)
            raise RequestRefused(
                f"there is no group {name!r}. Remedy: name one of {known}.", code="unknown_group"
            )
        return self._groups[name]

    def _check_state(self, group: ServedGroup, action: str, *allowed: str) -> None:
        state = "restarting" if group.restarting else group.state
        if state not in allowed:
            raise _refused(
                f"cannot {action} {group.name}, which is {state}",
                code="wrong_state",
                remedy=f"watch GET /admin/replicas until it is {' or '.join(allowed)}",
            )

    def _begin_drain(self, group: ServedGroup) -> None:
        if not group.drain_wanted:
            group.drain_wanted = True
            group.drained.clear()
            self._handle(Drain(group.name))

    def _end_drain(self, group: ServedGroup) -> None:
        group.drain_wanted = False
        group.drained.set()  # ends a waiting `drain`
        if not group.down:
            self._handle(Resume(group.name))


def _refused(what: str, *, code: str, remedy: str) -> RequestRefused:
    return RequestRefused(f"{what}. Remedy: {remedy}.", code=code, status=409)
