"""The adapters that requests can use by name, and the ranks that have them.

Each loaded adapter has a unique number, so cached results of an unloaded adapter are never used for another one of the
same name.

A group that is up gets an entry in its log, between two steps, and every rank answers. A group that is down gets it
when it is back, before its first step. If one rank cannot add an adapter, it is removed from all.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from vsched.aio.leader import Leader
from vsched.aio.worker_groups import ServedGroup, ServedGroups
from vsched.config import Config
from vsched.errors import CheckpointError, RequestRefused
from vsched.probes import probe
from vsched.types import Request
from vsched.wire import AddAdapter, RemoveAdapter
from vsched.worker.contract import AdapterFacts


def _check(leader: Leader, added: asyncio.Future[list[str]]) -> None:
    """Lose a group that could not add an adapter again."""
    with contextlib.suppress(asyncio.CancelledError):
        for rank, error in enumerate(added.result()):
            if error:
                leader.refuse(rank, f"could not add an adapter again: {error}")


NAME_CHARACTERS_MAX = 256


class ServedAdapter:
    """One adapter.

    Attributes:
        state: `loading`, `ready` or `unloading`; requests are accepted only when it is `ready`.
        entry: The log entry with which ranks add it; None before all groups have added it, and once it is removed.
        requests: Number of requests so far.
        users: Current requests, oldest first.
    """

    def __init__(self, name: str, number: int, path: str) -> None:
        self.name = name
        self.number = number
        self.path = path
        self.state = "loading"
        self.facts = AdapterFacts(0)
        self.entry: AddAdapter | None = None
        self.requests = 0
        self.users: dict[AdapterHold, None] = {}
        self.idle = asyncio.Event()

    @property
    def stages(self) -> tuple[str, ...]:
        return ("encode", "generate") if self.facts.changes_encoder else ("generate",)


class AdapterHold:
    """A request's use of an adapter, from its arrival to its end.

    Attributes:
        interrupt: Ends the request with a message; None while it is being prepared.
    """

    def __init__(self, adapter: ServedAdapter) -> None:
        self.number = adapter.number
        self.changes_encoder = adapter.facts.changes_encoder
        self.interrupt: Callable[[str], None] | None = None
        self._adapter = adapter
        adapter.users[self] = None
        adapter.requests += 1
        adapter.idle.clear()

    def mark_running(self, interrupt: Callable[[str], None]) -> None:
        """Note that the request is being submitted; `interrupt` ends it from now on.

        Raises:
            RequestRefused: When the adapter was unloaded while the request was prepared.
        """
        if self not in self._adapter.users:
            raise _unknown(self._adapter.name)
        self.interrupt = interrupt

    def release(self) -> None:
        self._adapter.users.pop(self, None)
        if not self._adapter.users:
            self._adapter.idle.set()


def with_adapter(request: Request, hold: AdapterHold) -> Request:
    """Return a request with its adapter; if that changes the encoder, image keys include its number."""
    items = request.items
    if hold.changes_encoder:
        number = hold.number.to_bytes(8, "little")
        items = tuple(
            item
            if item.encoded
            else msgspec.structs.replace(
                item,
                key=blake2b(
                    item.key, digest_size=32, salt=number, person=b"vsched.adapter"
                ).digest(),
                adapter=hold.number,
            )
            for item in items
        )
    return msgspec.structs.replace(request, adapter=hold.number, items=items)


Keep = Callable[[str, str], AdapterFacts]
"""Copies the files in a folder to another and checks them; blocks, and may raise `CheckpointError`."""


class AdapterTable:
    """Loads, unloads and finds adapters by name; a lost group gets them again when it is back."""

    def __init__(
        self, config: Config, groups: ServedGroups, keep: Keep | None, *, kept_in: str
    ) -> None:
        """Create an empty table; `keep` is None if the plug-in supports no adapters.

        Copies of adapters are kept in the folder `kept_in`.
        """
        self._base = config.model.served_name
        self._limits = config.adapters
        self._drain_s = config.deadlines.drain_s
        self._kept_in = Path(kept_in)
        self._groups = groups
        self._keep = keep
        self._named: dict[str, ServedAdapter] = {}
        self._numbers = itertools.count(1)
        self._changes: set[asyncio.Task[None]] = set()

    # --- requests ---

    def hold_adapter(self, name: str) -> AdapterHold:
        """Register a request that uses an adapter.

        Raises:
            RequestRefused: When there is no such adapter, or it is not ready.
        """
        adapter = self._named.get(name)
        if adapter is None or adapter.state != "ready":
            raise _unknown(name)
        return AdapterHold(adapter)

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "name": adapter.name,
                "state": adapter.state,
                "path": adapter.path,
                "rank": adapter.facts.rank,
                "changes_encoder": adapter.facts.changes_encoder,
                "running": len(adapter.users),
                "requests": adapter.requests,
            }
            for adapter in self._named.values()
        ]

    # --- operators ---

    def path_of(self, wanted: str) -> str:
        """Return the absolute path of an adapter to load at run time.

        Raises:
            RequestRefused: When it is not below the configured directory.
        """
        directory = self._limits.directory
        if not directory:
            raise RequestRefused(
                "adapters are loaded at start only. Remedy: set adapters.directory to their folder.",
                code="adapters_fixed",
                status=403,
            )
        root = Path(directory).resolve()
        found = (root / wanted).resolve() if "\0" not in wanted else root
        if found == root or not found.is_relative_to(root):
            raise RequestRefused.of_limit(
                "the adapter's path",
                value=repr(wanted[:NAME_CHARACTERS_MAX]),
                limit="a folder below adapters.directory",
                remedy="put the adapter there, and give its path from there on",
                code="path_not_allowed",
                status=403,
            )
        return str(found)

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter; see `Engine.load_adapter`. Cancelling does not stop it."""
        self._check(name)
        adapter = self._named[name] = ServedAdapter(name, next(self._numbers), path)
        await self._to_the_end(self._load(adapter))

    async def unload(self, name: str) -> None:
        """Unload an adapter; see `Engine.unload_adapter`. Cancelling does not stop it."""
        adapter = self._named.get(name)
        if adapter is None:
            raise _unknown(name)
        if adapter.state != "ready":
            raise RequestRefused(
                f"the adapter {name!r} is {adapter.state}. Remedy: watch GET /admin/adapters until it is not.",
                code="wrong_state",
                status=409,
            )
        adapter.state = "unloading"
        await self._to_the_end(self._unload(adapter))

    def close(self) -> None:
        """Cancel pending changes; the ranks have ended."""
        for task in self._changes:
            task.cancel()

    async def _to_the_end(self, change: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved
        await asyncio.shield(task)

    async def _load(self, adapter: ServedAdapter) -> None:
        kept = self._kept_in / str(adapter.number)
        try:
            adapter.facts = await asyncio.to_thread(self._copy, adapter.path, kept)
            await self._add(adapter, AddAdapter(adapter.number, str(kept)))
        except BaseException:
            del self._named[adapter.name]
            await asyncio.to_thread(shutil.rmtree, kept, ignore_errors=True)
            raise
        adapter.state = "ready"

    async def _add(self, adapter: ServedAdapter, entry: AddAdapter) -> None:
        """Add an adapter to all groups of its stages, or to none.

        Blocks: up to `adapters.load_s`, after which it is removed again.

        Raises:
            RequestRefused: When a rank cannot add it, no group of a stage is up, or the deadline has passed.
        """
        limit_s = self._limits.load_s
        try:
            async with asyncio.timeout(limit_s):
                await self._add_to_all(entry, adapter.stages)
        except TimeoutError:
            await self._remove(adapter)
            raise RequestRefused(
                f"the ranks did not add the adapter within {limit_s:g} s (adapters.load_s). "
                "Remedy: try again when they are less busy, or raise it.",
                code="adapter_overdue",
                status=503,
                retry_after_s=5,
            ) from None
        except BaseException:
            await self._remove(adapter)
            raise
        adapter.entry = entry

    async def _add_to_all(self, entry: AddAdapter, stages: Sequence[str]) -> None:
        """Send the entry to every group that is up, including groups that come back in between."""
        reported: list[Leader] = []
        added: set[str] = set()
        while due := [group for group in self._up(stages) if group.leader not in reported]:
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

    async def _remove(self, adapter: ServedAdapter) -> None:
        """Remove an adapter from all groups.

        Blocks: until all groups that are up have removed it; one that does not answer in time is lost.
        """
        adapter.entry = None
        entry = RemoveAdapter(adapter.number)
        changes = [group.leader.change_adapters(entry) for group in self._up(adapter.stages)]
        await asyncio.gather(*changes, return_exceptions=True)

    def restore_adapters(self, group: ServedGroup) -> None:
        """Send all adapters to a restarted group; it runs no step before it has them."""
        leader = group.leader
        for adapter in self._named.values():
            if adapter.entry is not None and group.stage in adapter.stages:
                probe("adapters.restored")
                added = leader.change_adapters(adapter.entry)
                added.add_done_callback(partial(_check, leader))

    def _up(self, stages: Sequence[str]) -> list[ServedGroup]:
        groups = [group for stage in stages for group in self._groups.of_stage(stage)]
        return [group for group in groups if group.state in ("up", "draining")]

    def _copy(self, path: str, kept: Path) -> AdapterFacts:
        assert self._keep is not None, "else there may be none"
        try:
            facts = self._keep(path, str(kept))
        except OSError as error:
            raise RequestRefused(
                f"the adapter cannot be copied ({error.strerror}). Remedy: free space for temporary files.",
                code="adapter_unusable",
                status=503,
            ) from error
        except CheckpointError as error:
            if not Path(path).is_dir():
                raise RequestRefused(
                    f"there is no folder {Path(path).name!r}. Remedy: put the adapter there, or correct the path.",
                    code="adapter_not_found",
                    status=404,
                ) from error
            raise RequestRefused(str(error), code="adapter_unusable") from error
        if facts.changes_encoder and not self._limits.encoder:
            raise RequestRefused(
                "the adapter changes how images are encoded. Remedy: set adapters.encoder, or use one of the language "
                "model alone.",
                code="adapter_unusable",
            )
        return facts

    async def _unload(self, adapter: ServedAdapter) -> None:
        if adapter.users:
            try:
                async with asyncio.timeout(self._drain_s):
                    await adapter.idle.wait()
            except TimeoutError:
                self._interrupt(adapter)
        await self._remove(adapter)
        del self._named[adapter.name]
        kept = self._kept_in / str(adapter.number)
        await asyncio.to_thread(shutil.rmtree, kept, ignore_errors=True)

    def _interrupt(self, adapter: ServedAdapter) -> None:
        users, adapter.users = adapter.users, {}
        for user in users:
            if user.interrupt is not None:
                user.interrupt(
                    f"the adapter {adapter.name!r} was unloaded, and the request was not done within "
                    f"{self._drain_s:g} s (deadlines.drain_s)"
                )

    def _check(self, name: str) -> None:
        if not name or len(name) > NAME_CHARACTERS_MAX or not name.isprintable():
            raise RequestRefused.of_limit(
                "the adapter's name",
                value=repr(name[:NAME_CHARACTERS_MAX]),
                limit=f"1 to {NAME_CHARACTERS_MAX} printable characters",
                remedy="use another name",
                code="invalid_name",
            )
        if name == self._base or name in self._named:
            what = "the model itself" if name == self._base else "an adapter that is there"
            raise RequestRefused(
                f"{name!r} is the name of {what}. Remedy: use another name, or unload that adapter first.",
                code="name_taken",
                status=409,
            )
        if len(self._named) >= self._limits.count_max or self._keep is None:
            raise RequestRefused.of_limit(
                "adapters at a time",
                value=len(self._named) + 1,
                limit=self._limits.count_max if self._keep is not None else 0,
                remedy="unload one first, or raise adapters.count_max",
                code="too_many_adapters",
                status=409,
            )


def _unknown(name: str) -> RequestRefused:
    return RequestRefused(
        f"there is no adapter {name[:NAME_CHARACTERS_MAX]!r}. Remedy: ask for one of /v1/models.",
        code="model_not_found",
        status=404,
    )
