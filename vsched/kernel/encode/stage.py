"""The encode stage: which items are encoded, cached, pinned and evicted.

An item has one entry under its content key, however many requests want it. An entry is *queued*, *encoding* or *ready*.
Two things keep a ready entry in place: requests that still need it (`users`), and generate steps in flight that read
its pages (`readers`). Users are a soft claim, readers a hard one.

Why this cannot deadlock. Entries stand in the queue by (arrival of their oldest user, index of the item in its
request). The front of the queue may take the pages of any ready entry whose every user stands behind it and that no
step in flight reads; such an entry goes back to the queue. So the oldest request always gets its next item: all pages
but those of steps in flight, which end by themselves, and those of its own earlier items, which it consumes first, can
be taken for it. An item larger than the whole region is refused at submission.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vsched.kernel.encode.embedding_cache import EmbeddingEntry, EntryPhase
from vsched.kernel.encode.group import EncodeGroup
from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.policy_calls import GuardedOrder, PolicyFaults, ask_admission
from vsched.kernel.request import RequestState
from vsched.kernel.waiting_queue import OrderedQueue
from vsched.policy import AdmissionPolicy, AdmissionView, EvictionPolicy
from vsched.types import MediaItem, group_names

ATTEMPTS_MAX = 2
"""An item that fails this often is refused for good. What counts is an error alone, and a loss of the group."""


class EncodeStage:
    """Items waiting for an encoder, in one line for all encode groups, and the embedding cache in the arena."""

    def __init__(
        self,
        limits: SchedulerLimits,
        admission: AdmissionPolicy,
        eviction: EvictionPolicy,
        faults: PolicyFaults,
    ) -> None:
        self._limits = limits
        self._admission = admission
        self._faults = faults
        self._entries: dict[bytes, EmbeddingEntry] = {}
        self._queue: OrderedQueue[EmbeddingEntry] = OrderedQueue()
        self._order: GuardedOrder[bytes] = GuardedOrder(eviction, faults)
        self._free = list(range(limits.pages - 1, -1, -1))
        self._evictable_pages = 0
        self._cohorts = 0
        self.lanes = [EncodeGroup(name) for name in group_names("encode", limits.encoders)]
        self.hold_until_ns: int | None = None
        self.items_encoded = 0
        self.items_copied = 0
        self.tokens_encoded = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self.steals = 0

    # --- what requests ask for ---

    def want(self, state: RequestState, index: int, now_ns: int) -> bool:
        """Claim an item for a request; return whether its embedding is ready."""
        item, user, order = state.items[index], state.number, (state.number, index)
        entry = self._entries.get(item.key)
        if entry is not None and entry.item.tokens != item.tokens and self._is_idle(entry):
            # D9: the digest says the same, the length another: the cached entry cannot be trusted.
            self._discard(entry)
            entry = None
        if entry is None:
            self.misses += 1
            entry = EmbeddingEntry(state, index, now_ns)
            self._entries[item.key] = entry
            self._queue.put(entry)
            self.hold_until_ns = None  # the policy may find it worth going now
            return False
        if user not in entry.users:
            self.hits += 1
            self._use(entry)
            if entry.item.tokens == item.tokens:
                entry.item = item  # the pixels of an earlier user may be gone
            entry.heed(state)
        entry.users[user] = min(order, entry.users.get(user, order))
        self._move_up(entry, order)
        return entry.phase is EntryPhase.READY

    def matches(self, item: MediaItem) -> bool:
        """Return whether the entry of a wanted item has the item's own length (D13)."""
        return self._entries[item.key].item.tokens == item.tokens

    def _release(self, key: bytes, user: int) -> None:
        """Drop a request's claim; what nobody else claims may go."""
        entry = self._entries[key]
        del entry.users[user]
        if entry.users:
            return
        if entry.phase is EntryPhase.QUEUED:
            self._queue.remove(entry)
            del self._entries[key]
        elif entry.phase is EntryPhase.ENCODING:
            entry.tainted = True
        else:
            self._idle(entry)

    def is_ready(self, key: bytes) -> bool:
        """Return whether an item's embedding lies in the arena."""
        entry = self._entries.get(key)
        return entry is not None and entry.phase is EntryPhase.READY

    def read(self, key: bytes) -> list[int]:
        """Pin a ready entry for a generate step and return its pages."""
        entry = self._entries[key]
        assert entry.phase is EntryPhase.READY, "a step reads an embedding that is not ready"
        self._use(entry)
        entry.readers += 1
        return entry.pages

    def done_reading(self, state: RequestState, start: int, stop: int) -> None:
        """Unpin the items that a chunk over [start, stop) read: its step is over."""
        for item in state.items:
            if item.offset < stop and item.end > start:
                entry = self._entries[item.key]
                entry.readers -= 1
                if not entry.users:
                    self._idle(entry)

    def consume(self, state: RequestState, index: int) -> None:
        """Drop a request's claim on one item; another of its items may have the same content."""
        key = state.items[index].key
        others = [other for other in sorted(state.wanted) if state.items[other].key == key]
        if others:
            self._entries[key].users[state.number] = (state.number, others[0])
        else:
            self._release(key, state.number)

    # --- steps ---

    def plan(
        self, now_ns: int, held_up: Callable[[EncodeGroup], int]
    ) -> tuple[EncodeGroup, list[EmbeddingEntry]] | None:
        """Form the next batch, if a group is free and something can be encoded; return the group that is to have it.

        Of the free groups, the one that keeps the fewest requests from their next tokens gets it: `held_up` says how
        many those are.
        """
        free = [lane for lane in self.lanes if lane.open and lane.idle]
        if not (free and self._queue.entries):
            return None
        if self.hold_until_ns is not None and now_ns < self.hold_until_ns:
            return None
        waiting = self._queue.entries
        view = AdmissionView(
            stage="encode",
            now_ns=now_ns,
            waiting=waiting,
            tokens_free=self._limits.batch_tokens,
            entries_free=self._limits.encode_items,
            blocks_free=0,
            running=self.in_flight,
            divisible=False,
            default_tokens=self._limits.batch_tokens,
        )
        admission = ask_admission(self._admission, view, self._faults)
        self.hold_until_ns = admission.hold_until_ns
        chosen = [waiting[index] for index in admission.indices][: self._limits.encode_items]
        batch = self._take(chosen)
        if not batch and chosen:
            # The policy's first choice has no room. The front of the line can always make some.
            batch = self._take([waiting[0]])
        return (min(free, key=held_up), batch) if batch else None

    def _take(self, chosen: list[EmbeddingEntry]) -> list[EmbeddingEntry]:
        """Move entries from the queue into a batch, as far as pages allow; a cohort goes by itself, and whole."""
        cohort = chosen[0].cohort if chosen else 0
        if cohort:
            chosen = [entry for entry in self._queue if entry.cohort == cohort]
        batch: list[EmbeddingEntry] = []
        for entry in chosen:
            if entry.cohort != cohort or not self._allocate(entry):
                break
            self._queue.remove(entry)
            entry.phase = EntryPhase.ENCODING
            batch.append(entry)
        return batch

    def finish(self, lane: EncodeGroup, step: int) -> list[int]:
        """Take a finished batch; return the requests that wait for items of it, oldest first."""
        batch = lane.land(step)
        waiting: set[int] = set()
        for entry in batch:
            if entry.tainted:
                self._requeue(entry)
                continue
            entry.phase = EntryPhase.READY
            entry.cohort = 0
            if entry.item.encoded:
                self.items_copied += 1
            else:
                self.items_encoded += 1
                self.tokens_encoded += entry.item.tokens
            waiting.update(entry.users)
            if not entry.users:
                self._idle(entry)
        return sorted(waiting)

    def fail(self, lane: EncodeGroup, step: int) -> list[int]:
        """Take a failed batch: halve it until the culprit is alone, and return the requests that it fails (F1)."""
        batch = lane.land(step)
        half = -(-len(batch) // 2)
        self._set_apart(batch[:half])
        self._set_apart(batch[half:])
        return self._retry(batch, blame=len(batch) == 1)

    def lose(self, lane: EncodeGroup, *, blame: bool) -> list[int]:
        """The group is gone: its batch waits again, one by one: a loss costs a restart; return whom to fail."""
        batch = lane.lose()
        for entry in batch:
            self._set_apart([entry])
        return self._retry(batch, blame=blame)

    def free_orphaned(self, lane: EncodeGroup) -> None:
        """The ranks that a lost group had are gone: what they could write to is free."""
        self._free += lane.orphaned
        lane.orphaned = []

    def _set_apart(self, entries: Iterable[EmbeddingEntry]) -> None:
        self._cohorts += 1
        for entry in entries:
            entry.cohort = self._cohorts

    def _retry(self, batch: list[EmbeddingEntry], *, blame: bool) -> list[int]:
        failed: set[int] = set()
        for entry in batch:
            entry.attempts += blame
            if entry.attempts >= ATTEMPTS_MAX:
                failed.update(entry.users)
            self._requeue(entry)
        return sorted(failed)

    def users_waiting(self) -> list[int]:
        """Return the requests that wait for an item that no group works on, oldest first."""
        return sorted({user for entry in self._queue for user in entry.users})

    def _requeue(self, entry: EmbeddingEntry) -> None:
        self._free.extend(entry.pages)
        entry.pages = []
        entry.phase = EntryPhase.QUEUED
        entry.tainted = False
        if entry.users:
            entry.order = min(entry.users.values())
            self._queue.put(entry)
        else:
            del self._entries[entry.item.key]

    # --- pages ---

    def _allocate(self, entry: EmbeddingEntry) -> bool:
        """Give an entry its pages, evicting or taking what may be taken; all or nothing (D11)."""
        count = self._limits.pages_for(entry.item.tokens)
        missing = count - len(self._free) - self._evictable_pages
        takeable: list[EmbeddingEntry] = []
        if missing > 0:
            takeable = self._takeable(entry.order, missing)
            if sum(len(other.pages) for other in takeable) < missing:
                return False
        while len(self._free) < count and len(self._order) > 0:
            victim = self._entries[self._order.take_victims(1)[0]]
            self.evictions += 1
            self._evictable_pages -= len(victim.pages)
            self._drop(victim)
        for other in takeable:
            self.steals += 1
            self._requeue(other)
        entry.pages = [self._free.pop() for _ in range(count)]
        return True

    def _takeable(self, order: tuple[int, int], pages: int) -> list[EmbeddingEntry]:
        """Return entries of younger users, youngest first, until they make up so many pages."""
        candidates = [
            other
            for other in self._entries.values()
            if other.phase is EntryPhase.READY
            and not other.readers
            and other.users
            and min(other.users.values()) > order
        ]
        candidates.sort(key=lambda other: min(other.users.values()), reverse=True)
        chosen = []
        for other in candidates:
            if pages <= 0:
                break
            chosen.append(other)
            pages -= len(other.pages)
        return chosen

    def _is_idle(self, entry: EmbeddingEntry) -> bool:
        return entry.phase is EntryPhase.READY and not entry.users and not entry.readers

    def _use(self, entry: EmbeddingEntry) -> None:
        """Keep an entry from eviction, before its first user or reader is added."""
        if self._is_idle(entry):
            self._order.reuse(entry.item.key)
            self._evictable_pages -= len(entry.pages)

    def _idle(self, entry: EmbeddingEntry) -> None:
        """Let an entry that nobody uses become evictable, or drop it where the policy keeps nothing."""
        if not self._is_idle(entry):
            return
        if self._order.add(entry.item.key, len(entry.pages)):
            self._evictable_pages += len(entry.pages)
        else:
            self._drop(entry)

    def _discard(self, entry: EmbeddingEntry) -> None:
        self._order.drop(entry.item.key)
        self._evictable_pages -= len(entry.pages)
        self._drop(entry)

    def _drop(self, entry: EmbeddingEntry) -> None:
        self._free.extend(entry.pages)
        del self._entries[entry.item.key]

    def _move_up(self, entry: EmbeddingEntry, order: tuple[int, int]) -> None:
        """An older request wants a queued item too: it takes the older place."""
        if order >= entry.order:
            return
        if entry.phase is EntryPhase.QUEUED:
            self._queue.remove(entry)
            entry.order = order
            self._queue.put(entry)
        else:
            entry.order = order

    # --- views ---

    @property
    def ready(self) -> bool:
        """Whether any group is there to work."""
        return any(lane.open for lane in self.lanes)

    @property
    def orphaned(self) -> int:
        """Pages that lost ranks may still write to."""
        return sum(len(lane.orphaned) for lane in self.lanes)

    @property
    def in_flight(self) -> int:
        """Items in the encode steps that are out."""
        return sum(len(lane.flying) for lane in self.lanes)

    @property
    def waiting(self) -> int:
        """Items that wait for the encoder."""
        return len(self._queue.entries)

    def statistics(self) -> dict[str, Any]:
        """Return counters and sizes; pages are of `page_rows` embedding rows."""
        return {
            "waiting_items": len(self._queue),
            "running_items": self.in_flight,
            "items_encoded": self.items_encoded,
            "items_copied": self.items_copied,
            "tokens_encoded": self.tokens_encoded,
            "cache_hits": self.hits,
            "cache_misses": self.misses,
            "cache_entries": len(self._entries),
            "cache_evictions": self.evictions,
            "cache_steals": self.steals,
            "pages_total": self._limits.pages,
            "pages_free": len(self._free),
            "pages_evictable": self._evictable_pages,
            "pages_orphaned": self.orphaned,
            "groups": {lane.name: lane.statistics() for lane in self.lanes},
        }

    def check(self, live: Iterable[int]) -> None:
        """Assert that pages are conserved, phases consistent and every user alive."""
        alive = sorted(live)
        pages = [*self._free, *(page for lane in self.lanes for page in lane.orphaned)]
        for key, entry in self._entries.items():
            assert key == entry.item.key
            assert entry.users.keys() <= set(alive), "a dead request claims an item"
            pages.extend(entry.pages)
            queued = entry.phase is EntryPhase.QUEUED
            assert queued == (entry in self._queue), "queue and phase disagree"
            assert queued == (not entry.pages), "a queued entry has pages, or another has none"
            assert not (queued and not entry.users), "a queued entry that nobody wants"
        assert sorted(pages) == list(range(self._limits.pages)), "pages lost or owned twice"
        idle = sorted(key for key, entry in self._entries.items() if self._is_idle(entry))
        assert sorted(self._order) == idle, "evictable entries are not the idle ones"
        assert self._evictable_pages == sum(len(self._entries[key].pages) for key in idle)

    def __iter__(self) -> Iterator[EmbeddingEntry]:
        return iter(self._entries.values())
