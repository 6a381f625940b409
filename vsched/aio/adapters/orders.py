"""Adds and removes adapters on the ranks of all groups, also if groups are lost in between.

A group that is up gets an entry in its log, between two steps, and every rank answers. A group that is down gets it
when it is back, before its first step. If one rank cannot add an adapter, it is removed from all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial

from vsched.aio.leader.leader import Leader
from vsched.aio.replicas.groups import ServedGroup, ServedGroups
from vsched.errors import RequestRefused
from vsched.probes import probe
from vsched.wire import AddAdapter, RemoveAdapter


class AdapterOrders:
    """The adapters of all groups of their stages; a lost group gets them again when it is back."""

    def __init__(self, groups: ServedGroups, *, deadline_s: float) -> None:
        """Manage the adapters of these groups; adding one takes at most `deadline_s`."""
        self._groups = groups
        self._deadline_s = deadline_s
        self._kept: dict[int, tuple[AddAdapter, Sequence[str]]] = {}

    async def add(self, number: int, path: str, stages: Sequence[str]) -> None:
        """Add an adapter to all groups of these stages, or to none.

        Blocks: up to the deadline, after which it is removed again.

        Raises:
            RequestRefused: When a rank cannot add it, no group of a stage is up, or the deadline has passed.
        """
        entry = AddAdapter(number, path)
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._add_to_all(entry, stages)
        except TimeoutError:
            await self.remove(number, stages)
            raise RequestRefused(
                f"the ranks did not add the adapter within {self._deadline_s:g} s (adapters.load_s). "
                "Remedy: try again when they are less busy, or raise it.",
                code="adapter_overdue",
                status=503,
                retry_after_s=5,
            ) from None
        except BaseException:
            await self.remove(number, stages)
            raise

    async def _add_to_all(self, entry: AddAdapter, stages: Sequence[str]) -> None:
        """Send the entry to every group that is up, including those that come back in between, then keep it."""
        reported: list[Leader] = []
        added: set[str] = set()
        while True:
            due = [group for group in self._up(stages) if group.leader not in reported]
            if not due:
                break
            reported += [group.leader for group in due]
            choices = await asyncio.gather(
                *(group.leader.change_adapters(entry) for group in due), return_exceptions=True
            )
            for group, errors in zip(due, choices, strict=True):
                if isinstance(errors, BaseException):
                    probe("adapters.lost_while_adding")
                    continue  # the group was lost; it gets the adapter when it is back
                wrong = next((error for error in errors if error), "")
                if wrong:
                    raise RequestRefused(f"{group.name}: {wrong}", code="adapter_unusable")
                added.add(group.stage)
        gone = [stage for stage in stages if stage not in added]
        if gone:
            raise RequestRefused(
                f"no {gone[0]} group is up to add the adapter. Remedy: try again when one is back.",
                code="not_ready",
                status=503,
                retry_after_s=5,
            )
        self._kept[entry.number] = (entry, stages)

    async def remove(self, number: int, stages: Sequence[str]) -> None:
        """Remove an adapter from all groups.

        Blocks: until all groups that are up have removed it; one that does not answer in time is lost.
        """
        self._kept.pop(number, None)
        changes = [
            group.leader.change_adapters(RemoveAdapter(number)) for group in self._up(stages)
        ]
        await asyncio.gather(*changes, return_exceptions=True)

    def restore_adapters(self, group: ServedGroup) -> None:
        """Send all adapters to a restarted group; it runs no step before it has them."""
        for entry, stages in self._kept.values():
            if group.stage in stages:
                probe("adapters.restored")
                leader = group.leader
                added = leader.change_adapters(entry)
                added.add_done_callback(partial(_check, leader))

    def _up(self, stages: Sequence[str]) -> list[ServedGroup]:
        return [
            group for stage in stages for group in self._groups.of_stage(stage) if _takes(group)
        ]


def _takes(group: ServedGroup) -> bool:
    return not group.down and group.retired is None


def _check(leader: Leader, added: asyncio.Future[list[str]]) -> None:
    """Lose a group that could not add an adapter again."""
    with contextlib.suppress(asyncio.CancelledError):
        for rank, error in enumerate(added.result()):
            if error:
                leader.refuse(rank, f"could not add an adapter again: {error}")
