"""The encode stage: the encode groups, and the batches of items that they are given.

All groups share one queue of items, which belongs to the embedding cache; a group has at most one batch at a time. A
batch that fails is halved until the item at fault is alone; a batch that was lost with its group is encoded again item
by item, for a loss costs a restart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from vsched.kernel.commands import Decide
from vsched.kernel.decisions import EncodeDecision, EncodeTask
from vsched.kernel.encode.embedding_cache import EmbeddingCache, EmbeddingEntry
from vsched.kernel.groups import Group, unready_reason
from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.request import RequestState
from vsched.policy import (
    AdmissionView,
    Dispatch,
    DispatchView,
    EncodeGroupView,
    WaitingEntry,
)
from vsched.policy.checks import PASSED_OVER, put_first
from vsched.policy.measured import WINDOW, EncodeTime, Measured, Measurements
from vsched.policy_host.seats import PolicySeats
from vsched.policy_host.snapshot import Restorable, Saved, SavedKeys
from vsched.probes import probe
from vsched.types import group_names

_OTHER_ADMISSION = "Remedy: other fields of encode.admission, or another policy"
ATTEMPTS_MAX = 2
"""Attempts after which an item fails; errors in a batch of its own and losses of the group count."""


class HostingGroup(Protocol):
    """The generate group in the processes of an encode group, which runs no step while that encodes."""

    @property
    def decoding(self) -> int: ...
    @property
    def load_tokens(self) -> int: ...
    @property
    def decode_slack_ns(self) -> int: ...


class EncodeGroup(Group):
    """An encode group, with at most one batch at a time.

    Attributes:
        batch: The entries that it encodes, by the keys of their items.
        orphaned: Pages of the batch when it was lost. Its ranks may still run and write to them, so they stay allocated
            until the group is restarted or retired.
        sent_ns: Time of its latest batch.
        tokens_given: Tokens of all its batches.
    """

    batch: SavedKeys[dict[bytes, EmbeddingEntry]]
    orphaned: Saved[list[int]]
    step: Saved[int] = 0
    sent_ns: Saved[int] = 0
    tokens_given: Saved[int] = 0

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.batch = {}
        self.orphaned = []

    @property
    def idle(self) -> bool:
        """Whether it encodes nothing."""
        return not self.batch

    def send_batch(
        self,
        batch: list[EmbeddingEntry],
        now_ns: int,
        time_slice_ns: int,
        requests: Mapping[int, RequestState],
    ) -> Decide:
        """Start a batch, and return its decision; `requests` are all live ones."""
        self.batch = {entry.item.key: entry for entry in batch}
        self.step += 1
        self.sent_ns = now_ns
        self.tokens_given += sum(entry.tokens or 0 for entry in batch)
        tasks = [_task(entry, requests) for entry in batch]
        return Decide(self.name, EncodeDecision(self.step, tasks, time_slice_ns=time_slice_ns))

    def take_batch(self, step: int) -> list[EmbeddingEntry]:
        """Return the batch of a completed step."""
        assert step == self.step, f"encode step {step} came back, {self.step} was due"
        assert self.batch, f"encode step {step} came back, no batch was out"
        batch, self.batch = [*self.batch.values()], {}
        return batch

    def lose_batch(self) -> list[EmbeddingEntry]:
        """Return the batch of a lost group, without its pages."""
        batch, self.batch = [*self.batch.values()], {}
        for entry in batch:
            self.orphaned += entry.pages
            entry.pages = []
        return batch

    def statistics(self) -> dict[str, str | int]:
        """Return its status, the size of its batch, and the number of its steps."""
        return {
            "state": self.status.value,
            "running_items": len(self.batch),
            "steps": self.step,
        }


class EncodeStage(Restorable):
    """The encode groups of a scheduler.

    Attributes:
        encodes: Times of the latest steps.
        measured: Measured times for policies; the scheduler sets it.
        hosts: The generate group in the processes of each encode group, by name; the scheduler sets it.
    """

    encodes: Saved[deque[EncodeTime]]
    _retry_batches: Saved[int] = 0
    _items_encoded: Saved[int] = 0
    _items_copied: Saved[int] = 0
    _tokens_encoded: Saved[int] = 0

    def __init__(
        self,
        limits: SchedulerLimits,
        seats: PolicySeats,
        cache: EmbeddingCache,
        requests: Mapping[int, RequestState],
    ) -> None:
        self._requests = requests
        self._admission = seats.add_seat("encode.admission")
        self._dispatch = seats.add_seat("encode.dispatch")
        self._limits = limits
        self._cache = cache
        self._queue = cache.queue
        self.groups = [EncodeGroup(name) for name in group_names("encode", limits.encoders)]
        self.hosts: Mapping[str, HostingGroup] = {}
        self.encodes = deque(maxlen=WINDOW)
        self.measured: Measured = Measurements()

    # --- batches ---

    def plan(self, now_ns: int) -> Decide | None:
        """Start the next batch; return None if no group is free or nothing can be encoded."""
        if not self._queue.entries or self._queue.held_until(now_ns) is not None:
            return None
        groups = [one for one in self.groups if one.open]
        free = {index: self._decoding_at(one) for index, one in enumerate(groups) if one.idle}
        if not free:
            return None
        overdue = self._overdue(now_ns)
        group, waiting, shown = self._choose(groups, free, now_ns, overdue)
        if group is None or not waiting:
            return None
        if overdue is not None:
            entry = self._queue.entries[overdue]
            overdue = next((index for index, one in enumerate(waiting) if one is entry), None)
        view = AdmissionView(
            stage="encode",
            now_ns=now_ns,
            waiting=shown,
            tokens_free=self._limits.batch_tokens,
            entries_free=self._limits.encode_items,
            blocks_free=0,
            running=self.in_flight,
            divisible=False,
            default_tokens=self._limits.batch_tokens,
            overdue=overdue,
            hold_max_ns=self._limits.passed_over_ns,
            measured=self.measured,
            state=self._admission.state,
        )
        admission, _ = self._queue.admit(self._admission, view, waiting, fits=True)
        chosen = [waiting[index] for index in admission.indices][: self._limits.encode_items]
        batch = self._take_batch(chosen, now_ns)
        if not batch and chosen:
            # The policy's first choice has no room. The first entry of the queue can always get it.
            batch = self._take_batch([self._queue.entries[0]], now_ns)
            if batch:
                self._admission.overrule("the first image had no room, the front of the queue has")
                probe("encode.front_has_room")
        if not batch:
            return None
        host = self.hosts.get(group.name)
        slice_ns = 0 if host is None else host.decode_slack_ns
        return group.send_batch(batch, now_ns, slice_ns, self._requests)

    def _overdue(self, now_ns: int) -> int | None:
        """Return the index of the entry that goes first, whatever policies say."""
        most_ns = self._limits.passed_over_ns
        overdue = self._queue.overdue(now_ns, most_ns)
        return 0 if self._queue.entries[0].arrived_ns + most_ns <= now_ns else overdue

    def _choose(
        self,
        groups: Sequence[EncodeGroup],
        free: Mapping[int, int],
        now_ns: int,
        overdue: int | None,
    ) -> tuple[EncodeGroup | None, Sequence[EmbeddingEntry], Sequence[WaitingEntry]]:
        """Return the group of the next batch, None for none, the entries that may be in it, and their views.

        `groups` are open; `free` has those without a batch, with the requests that get no token while they work.
        """
        waiting, shown = self._queue.entries, self._queue.shown()
        if len(self.groups) == len(waiting) == 1:
            # Only one answer is possible: a free group, while nothing is being encoded, must get the only entry.
            return groups[0], waiting, shown
        view = DispatchView(
            now_ns=now_ns,
            groups=tuple([self._view(one) for one in groups]),
            waiting=shown,
            overdue=overdue,
            measured=self.measured,
            state=self._dispatch.state,
        )
        found: Dispatch = self._dispatch.decide(view, len(shown), free, self.in_flight)
        chosen, order = found.group, found.order
        if overdue is not None:
            first = None if order is None else put_first(order, overdue)
            if chosen is None or first is not order:
                self._dispatch.overrule(PASSED_OVER)
            if chosen is None:
                chosen = min(free, key=free.__getitem__)
            order = first
        group = None if chosen is None else groups[chosen]
        if order is None:
            return group, waiting, shown
        return group, [waiting[index] for index in order], tuple([shown[i] for i in order])

    def _view(self, group: EncodeGroup) -> EncodeGroupView:
        sizes = [entry.tokens or 0 for entry in group.batch.values()]
        host = self.hosts.get(group.name)
        return EncodeGroupView(
            free=group.idle,
            items=len(sizes),
            tokens=sum(sizes),
            largest=max(sizes, default=0),
            since_ns=group.sent_ns,
            tokens_encoded=group.tokens_given,
            held_up=self._decoding_at(group),
            load_tokens=0 if host is None else host.load_tokens,
        )

    def _decoding_at(self, group: EncodeGroup) -> int:
        """Return the number of requests that decode in a group's processes, and get no token while it works."""
        host = self.hosts.get(group.name)
        return 0 if host is None else host.decoding

    def _take_batch(self, chosen: list[EmbeddingEntry], now_ns: int) -> list[EmbeddingEntry]:
        """Move entries from the queue into a batch, as far as pages allow; a retry batch goes by itself, and whole."""
        retry_batch = chosen[0].retry_batch if chosen else 0
        if retry_batch:
            chosen = [entry for entry in self._queue if entry.retry_batch == retry_batch]
        batch: list[EmbeddingEntry] = []
        for entry in chosen:
            if entry.retry_batch != retry_batch or not self._cache.start_encoding(entry, now_ns):
                break
            batch.append(entry)
        return batch

    def complete_batch(self, group: EncodeGroup, step: int, now_ns: int) -> list[int]:
        """Take a finished batch; return the requests that wait for items of it, oldest first."""
        waiting: set[int] = set()
        batch = group.take_batch(step)
        encoded = [entry.item.tokens for entry in batch if not entry.item.encoded]
        if encoded:
            took_ns = now_ns - group.sent_ns
            self.encodes.append(EncodeTime(now_ns, took_ns, len(encoded), sum(encoded)))
        for entry in batch:
            if not self._cache.finish_encoding(entry):
                continue
            if entry.item.encoded:
                self._items_copied += 1
            else:
                self._items_encoded += 1
                self._tokens_encoded += entry.item.tokens
            waiting.update(entry.claims)
        return sorted(waiting)

    def fail_batch(self, group: EncodeGroup, step: int) -> list[int]:
        """Take a failed batch: halve it until the item at fault is alone, and return the requests that it fails."""
        batch = group.take_batch(step)
        if len(batch) > 1:
            probe("encode.batch_halved")
        half = -(-len(batch) // 2)
        self._set_apart(batch[:half])
        self._set_apart(batch[half:])
        return self._retry(batch, blame=len(batch) == 1)

    def lose_group(self, group: EncodeGroup, *, blame: bool) -> list[int]:
        """A group is gone: its batch waits again, item by item; return the requests that fail over it."""
        batch = group.lose_batch()
        for entry in batch:
            if entry.stale:
                probe("encode.lost_unclaimed")
            self._set_apart([entry])
        return self._retry(batch, blame=blame)

    def free_orphaned(self, group: EncodeGroup) -> None:
        """Free the pages that the ranks of a lost group could write to, once they have ended."""
        if group.orphaned:
            probe("encode.orphaned_freed")
        orphaned, group.orphaned = group.orphaned, []
        self._cache.free += orphaned

    def _set_apart(self, entries: Iterable[EmbeddingEntry]) -> None:
        self._retry_batches += 1
        for entry in entries:
            entry.retry_batch = self._retry_batches

    def _retry(self, batch: list[EmbeddingEntry], *, blame: bool) -> list[int]:
        failed: set[int] = set()
        for entry in batch:
            entry.attempts += blame
            if entry.attempts >= ATTEMPTS_MAX:
                probe("encode.item_failed")
                failed.update(entry.claims)
            self._cache.requeue(entry)
        return sorted(failed)

    # --- views ---

    @property
    def in_flight(self) -> int:
        """Number of items that are being encoded."""
        return sum([len(group.batch) for group in self.groups])

    @property
    def ready(self) -> bool:
        """Whether any group is there to work, or nothing is ever encoded."""
        return not self.groups or any(group.open for group in self.groups)

    @property
    def gone(self) -> bool:
        """Whether there were groups, and all are retired."""
        return bool(self.groups) and all(group.retired for group in self.groups)

    @property
    def orphaned(self) -> list[int]:
        """Pages that lost ranks may still write to."""
        return [page for group in self.groups for page in group.orphaned]

    def explain(self, entry: EmbeddingEntry, now_ns: int) -> str:
        """Return why an image is not encoded yet, as a clause."""
        key, queue = entry.item.key, self._queue
        for group in self.groups:
            if key in group.batch:
                return f"{group.name} encodes it, for {(now_ns - group.sent_ns) / 1e9:.2f} s so far"
        if not self.ready:
            return unready_reason(self.groups[0].name, self.groups[0].status)
        if (held_ns := queue.held_until(now_ns)) is not None:
            held_s = (held_ns - now_ns) / 1e9
            return f"the admission policy holds all images for another {held_s:.1f} s. {_OTHER_ADMISSION}"
        ahead = queue.ahead_of(entry.order)
        if not any(group.open and group.idle for group in self.groups):
            busy = f"all {len(self.groups)} encode groups are busy; images ahead of it: {ahead}"
            return f"{busy}. Remedy: more encode.replicas, or smaller images"
        need, cached = self._limits.pages_for(entry.item.tokens), self._cache.statistics()
        room = cached["pages_free"] + cached["pages_evictable"]
        if need > room:
            return (
                f"it needs {need} pages for its embedding, and requests hold all but {room} of "
                f"{cached['pages_total']}. Remedy: a larger arena.embedding_bytes"
            )
        return f"the admission policy lets other images go first; images ahead of it: {ahead}. {_OTHER_ADMISSION}"

    def statistics(self) -> dict[str, Any]:
        """Return counters and sizes of the stage, and of each group."""
        return {
            "waiting_items": len(self._queue),
            "running_items": self.in_flight,
            "items_encoded": self._items_encoded,
            "items_copied": self._items_copied,
            "tokens_encoded": self._tokens_encoded,
            **self._cache.statistics(),
            "pages_orphaned": len(self.orphaned),
            "groups": {group.name: group.statistics() for group in self.groups},
        }


def _task(entry: EmbeddingEntry, requests: Mapping[int, RequestState]) -> EncodeTask:
    item = entry.item
    assert item.extent is not None, "an item without an extent reached the encode stage"
    pages = list(entry.pages)
    return EncodeTask(
        item.key,
        item.tokens,
        item.extent,
        pages,
        item.arrays,
        item.metadata,
        item.encoded,
        item.adapter,
        sorted({requests[number].replica for number in entry.claims}),
    )
