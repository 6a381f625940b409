"""What an operator does with one group while the others serve: drain it, restart its worker group, give it work again.

A group is *drained* to look at its device, say, and resumed. A *restart* drains all groups of the worker group first,
then replaces its ranks. The last group of a stage that is up can be restarted, since its requests wait for its
return, but not drained: they would wait for an operator.
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
    """Drains, restarts and resumes groups; `drain_s` bounds each drain."""

    def __init__(
        self, groups: ServedGroups, handle: Callable[[Event], None], *, drain_s: float
    ) -> None:
        self._groups = groups
        self._handle = handle
        self._drain_s = drain_s
        self._restarting: set[str] = set()

    async def drain(self, name: str) -> bool:
        """Give a group nothing new, and wait until nothing runs there; return whether that came in time.

        Blocks: up to the deadline for draining. After it, the group goes on draining.

        Raises:
            RequestRefused: When there is no such group, it is not up, or it is the last of its stage that is.
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
        """Replace the ranks of a group, once it is drained or the deadline has passed; return whether it is back.

        What still runs then goes on after the restart, as after any loss. A group that was retired starts again.

        Blocks: up to the deadline for draining, then as long as a worker group has to come back.

        Raises:
            RequestRefused: When there is no such group, or it is coming back already.
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
        """Let what runs on a worker group end, within the deadline; the encoder last: running requests need it."""
        names = [group.name for group in groups]
        self._restarting.update(names)
        try:
            async with asyncio.timeout(self._drain_s):
                for group in sorted(groups, key=lambda one: one.stage == "encode"):
                    self._begin_drain(group)
                    await group.drained.wait()
        except TimeoutError:
            probe("administration.drain_deadline")
            logger.warning("%s: not drained in %g s, restarted now", names, self._drain_s)
        except BaseException:
            for group in groups:
                self._end_drain(group)
            raise
        finally:
            self._restarting.difference_update(names)
        for group in groups:
            group.drain_wanted = False  # it comes back with new ranks, and takes work

    def resume(self, name: str) -> None:
        """Give a drained or draining group work again.

        Raises:
            RequestRefused: When there is no such group, or nobody drained it.
        """
        group = self._known(name)
        if not group.drain_wanted or name in self._restarting or group.retired:
            self._check_state(group, "resume", "draining")
        if not group.drained.is_set():
            probe("administration.resumed_while_draining")
        self._end_drain(group)

    def back(self, group: ServedGroup) -> None:
        """A lost group serves again; one that is to be drained goes on draining."""
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
        state = "restarting" if group.name in self._restarting else group.state
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
        group.drained.set()  # nobody need wait for it any more
        if not group.down:
            self._handle(Resume(group.name))


def _refused(what: str, *, code: str, remedy: str) -> RequestRefused:
    return RequestRefused(f"{what}. Remedy: {remedy}.", code=code, status=409)
