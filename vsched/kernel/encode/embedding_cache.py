"""The embedding cache: embeddings in the arena, the requests that need them, and eviction.

An item has one entry under its content key, for all requests that need it:

    claim --> QUEUED --(start_encoding)--> ENCODING --(finish_encoding)--> READY, claimed or pinned
               ^  ^                           |                               |    |            ^
               |  +-(requeue: failed, stale)--+                               | (release,    (claim,
               +----(requeue: preempted for an older request)-----------------+  unpin)       pin)
                                                                                   v            |
                                                                               READY, idle -----+--(_drop)--> evicted

A *claim* is of a request that still needs the entry, a *pin* of a generate step in flight that reads its pages. Claims
can be preempted, pins cannot.

It cannot deadlock: entries wait in the order of (arrival of their oldest claimant, index of the item in its request).
The first one may take the pages of any ready entry that only younger requests claim and no step in flight reads; that
entry returns to the queue. So the oldest request always gets its next item: all pages can be taken for it except those
of steps and batches in flight, which end by themselves, and of its own earlier items, which it consumes first. An item
larger than the whole region is refused at submission.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import cast

import msgspec

from vsched.kernel.decisions import ChunkItem
from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.live import MemoryMap, cell_size
from vsched.kernel.request import RequestState
from vsched.policy import CachePolicy, ReadyEmbedding, ReclaimView, WaitingEntry
from vsched.policy.measured import Measured, Measurements
from vsched.policy_host.eviction import GuardedOrder
from vsched.policy_host.seats import PolicySeats
from vsched.policy_host.snapshot import Restorable, Saved
from vsched.policy_host.waiting import OrderedQueue
from vsched.probes import probe
from vsched.types import MediaItem


class EntryPhase(enum.Enum):
    """Phase of an embedding."""

    QUEUED = "queued"
    ENCODING = "encoding"
    READY = "ready"


QUEUED, ENCODING, READY = EntryPhase  # as in `vsched.kernel.request`

PAGE_STATES = ("read", "claimed", "encoding", "cached")
"""States of pages: a step in flight reads it, a request needs it, it is being written, or nothing needs it."""


class EmbeddingEntry(msgspec.Struct, eq=False, kw_only=True):
    """One item's embedding.

    Attributes:
        order: Its place in the queue.
        tenant: Tenant of the first request that needed it.
        claims: The queue order of the item in each request that needs it, by the request's number.
        pins: Number of steps in flight that read its pages.
        attempts: Number of failed attempts to encode it.
        retry_batch: Entries with the same number are encoded again together, after their batch failed; 0 for none.
        stale: While it is encoded: its last claim was dropped, and its pixels may have been overwritten since, so the
            result is discarded.
    """

    item: MediaItem
    order: tuple[int, int]
    claims: dict[int, tuple[int, int]]
    arrived_ns: int
    priority: int
    target_ns: int | None
    tenant: str = ""
    phase: EntryPhase = QUEUED
    pages: list[int] = []
    pins: int = 0
    attempts: int = 0
    retry_batch: int = 0
    stale: bool = False

    @property
    def tokens(self) -> int | None:
        """Tokens to encode; 0 for an embedding from the client.

        None while it is encoded again after a failed batch: then no policy chooses its batch.
        """
        if self.retry_batch:
            return None
        return 0 if self.item.encoded else self.item.tokens

    @property
    def view(self) -> WaitingEntry:
        """View of the entry for admission and dispatch policies."""
        return WaitingEntry(
            tokens=self.tokens,
            priority=self.priority,
            arrived_ns=self.arrived_ns,
            target_ns=self.target_ns,
            tenant=self.tenant,
        )

    @property
    def is_idle(self) -> bool:
        """Whether it is ready, and neither claimed nor pinned."""
        return self.phase is READY and not self.claims and not self.pins

    def inherit_priority(self, state: RequestState) -> None:
        """Take over the priority and the target of a claimant, if they are more urgent."""
        self.priority = max(self.priority, state.request.priority)
        targets = [one for one in (self.target_ns, state.target_ns) if one is not None]
        self.target_ns = min(targets, default=None)

    def __repr__(self) -> str:
        return f"<item {self.item.key.hex()[:8]}: {self.item.tokens} tokens>"


class EmbeddingCache(Restorable):
    """The entries of all claimed or cached items, and the arena's pages.

    Attributes:
        entries: All entries, by the keys of their items.
        queue: The entries that wait for an encoder.
        free: Free pages.
        measured: Measured times for the reclaim policy; the scheduler sets it.
    """

    queue: Saved[OrderedQueue[EmbeddingEntry]]
    entries: Saved[dict[bytes, EmbeddingEntry]]
    _order: Saved[GuardedOrder[bytes]]
    free: Saved[list[int]]
    _hits: Saved[int] = 0
    _misses: Saved[int] = 0
    _evictions: Saved[int] = 0
    _preemptions: Saved[int] = 0

    def __init__(self, limits: SchedulerLimits, seats: PolicySeats) -> None:
        self.measured: Measured = Measurements()
        self._reclaim = seats.add_seat("encode.reclaim")
        eviction = cast("CachePolicy", seats.policies.by_table["encode.eviction"])
        self.queue = OrderedQueue()
        self._limits = limits
        self.entries = {}
        self._order = GuardedOrder(eviction, seats.faults)
        self.free = list(range(limits.pages - 1, -1, -1))
        self._evictable_pages = 0

    # --- claims of requests ---

    def claim(self, state: RequestState, index: int, now_ns: int) -> bool:
        """Claim an item for a request; return whether its embedding is ready."""
        item, order = state.items[index], (state.number, index)
        entry = self.entries.get(item.key)
        if entry is None:
            self._misses += 1
            entry = EmbeddingEntry(
                item=item,
                order=order,
                claims={state.number: order},
                arrived_ns=now_ns,
                priority=state.request.priority,
                target_ns=state.target_ns,
                tenant=state.request.tenant,
            )
            self.entries[item.key] = entry
            self.queue.put_new(entry)
            return False
        if state.number not in entry.claims:
            self._hits += 1
            self._make_unevictable(entry)
            if entry.item.tokens == item.tokens:  # else `claim_items` fails the request
                entry.item = item  # the pixels of an earlier claimant may be freed
            entry.inherit_priority(state)
            if entry.phase is QUEUED:
                self.queue.renew_view(entry)
        entry.claims[state.number] = min(order, entry.claims.get(state.number, order))
        if order < entry.order and entry.phase is QUEUED:
            probe("embeddings.moved_up")
            self.queue.remove(entry)
            entry.order = order
            self.queue.put(entry)
        return self.is_ready(item.key)

    def release_claim(self, state: RequestState, index: int) -> None:
        """Drop a request's claim on one item; another of its items may have the same content."""
        key = state.items[index].key
        entry = self.entries[key]
        others = [other for other in sorted(state.wanted) if state.items[other].key == key]
        if others:
            probe("embeddings.claimed_twice")
            entry.claims[state.number] = (state.number, others[0])
            return
        del entry.claims[state.number]
        if entry.claims:
            return
        if entry.phase is QUEUED:
            self.queue.remove(entry)
            del self.entries[key]
        elif entry.phase is ENCODING:
            probe("embeddings.unclaimed_while_encoding")
            entry.stale = True
        else:
            self._make_evictable(entry)

    def release_before(self, state: RequestState, computed: int) -> None:
        """Drop claims on items before `computed`: their KV is computed, and their embeddings are not needed."""
        for index, item in enumerate(state.items):
            if item.end > computed:
                break
            if index in state.wanted:
                state.wanted.discard(index)
                self.release_claim(state, index)

    # --- pins of generate steps ---

    def is_ready(self, key: bytes) -> bool:
        """Return True if an item's embedding is in the arena."""
        entry = self.entries.get(key)
        return entry is not None and entry.phase is READY

    def pin(self, item: MediaItem) -> ChunkItem:
        """Keep a ready embedding in place for a generate step, and return its position and pages."""
        entry = self.entries[item.key]
        assert entry.phase is READY, "a step reads an embedding that is not ready"
        self._make_unevictable(entry)
        entry.pins += 1
        return ChunkItem(item.offset, item.tokens, list(entry.pages))

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Unpin the items of a step that has ended."""
        for key in keys:
            entry = self.entries[key]
            entry.pins -= 1
            if not entry.claims:
                self._make_evictable(entry)

    # --- encoding ---

    def start_encoding(self, entry: EmbeddingEntry, now_ns: int) -> bool:
        """Allocate the pages of a queued entry and remove it from the queue; return False if there is no room."""
        if not self._allocate(entry, now_ns):
            return False
        self.queue.remove(entry, chosen_ns=now_ns)
        entry.phase = ENCODING
        return True

    def finish_encoding(self, entry: EmbeddingEntry) -> bool:
        """Make an encoded entry ready; return False if its result is discarded."""
        if entry.stale:
            probe("embeddings.stale_claimed_again" if entry.claims else "embeddings.stale_result")
            self.requeue(entry)
            return False
        entry.phase = READY
        entry.retry_batch = 0
        return True

    def requeue(self, entry: EmbeddingEntry) -> None:
        """Free an entry's pages; it is queued again if it is claimed, and else removed."""
        self.free.extend(entry.pages)
        entry.pages = []
        entry.phase = QUEUED
        entry.stale = False
        if entry.claims:
            entry.order = min(entry.claims.values())
            self.queue.put(entry)
        else:
            del self.entries[entry.item.key]

    def _allocate(self, entry: EmbeddingEntry, now_ns: int) -> bool:
        """Allocate all pages of an entry, with evictions and preemptions, or none; return False without room."""
        count = self._limits.pages_for(entry.item.tokens)
        missing = count - len(self.free) - self._evictable_pages
        victims: list[EmbeddingEntry] = []
        if missing > 0:
            victims = self._preemptible(entry, missing, now_ns)
            if sum(len(other.pages) for other in victims) < missing:
                probe("embeddings.no_room")
                return False
        while len(self.free) < count and len(self._order) > 0:
            evicted = self.entries[self._order.take_victims(1)[0]]
            self._evictions += 1
            self._evictable_pages -= len(evicted.pages)
            self._drop(evicted)
        for other in victims:
            probe("embeddings.claimed_preempted")
            self._preemptions += 1
            self.requeue(other)
        entry.pages = [self.free.pop() for _ in range(count)]
        return True

    def _preemptible(
        self, entry: EmbeddingEntry, missing: int, now_ns: int
    ) -> list[EmbeddingEntry]:
        """Choose victims among entries of younger requests, in the policy's order, until `missing` pages are found.

        There may be fewer, since the policy may spare some, except for the first entry of the queue.
        """
        candidates = [
            (oldest, other)
            for other in self.entries.values()
            if other.phase is READY and not other.pins and other.claims
            if (oldest := min(other.claims.values())) > entry.order
        ]
        ready = [other for _, other in sorted(candidates, key=itemgetter(0))]
        if sum(len(other.pages) for other in ready) < missing:
            return ready
        front = self.queue.entries[0] is entry
        view = ReclaimView(
            now_ns=now_ns,
            ready=tuple([_ready_view(other) for other in ready]),
            pages=missing,
            front=front,
            tokens=entry.tokens,
            priority=entry.priority,
            target_ns=entry.target_ns,
            tenant=entry.tenant,
            measured=self.measured,
            state=self._reclaim.state,
        )
        order: list[int] = self._reclaim.decide(view, len(ready))
        if front:
            # The spared ones follow, or the oldest request might never progress.
            if sum(len(ready[index].pages) for index in order) < missing:
                self._reclaim.overrule("embeddings were spared that the front of the queue needs")
            spared = set(range(len(ready))).difference(order)
            order += sorted(spared, reverse=True)
        chosen = []
        for index in order:
            if missing <= 0:
                break
            chosen.append(ready[index])
            missing -= len(ready[index].pages)
        return chosen

    # --- eviction ---

    def replace_eviction(self, policy: CachePolicy) -> None:
        """Hand the idle entries to another eviction policy, and drop refused ones."""
        for key in self._order.replace(policy, lambda key: len(self.entries[key].pages)):
            self._evictable_pages -= len(self.entries[key].pages)
            self._drop(self.entries[key])

    def _make_unevictable(self, entry: EmbeddingEntry) -> None:
        """Make an idle entry not evictable, before its first claim or pin."""
        if entry.is_idle:
            self._order.reuse(entry.item.key)
            self._evictable_pages -= len(entry.pages)

    def _make_evictable(self, entry: EmbeddingEntry) -> None:
        """Make an idle entry evictable, or drop it if the policy does not keep it."""
        if not entry.is_idle:
            return
        if self._order.add(entry.item.key, len(entry.pages)):
            self._evictable_pages += len(entry.pages)
        else:
            self._drop(entry)

    def _drop(self, entry: EmbeddingEntry) -> None:
        self.free.extend(entry.pages)
        del self.entries[entry.item.key]

    # --- views ---

    def map(self) -> MemoryMap:
        """Return the states of all pages."""
        size, count = cell_size(self._limits.pages), self._limits.pages
        cells = [[0] * len(PAGE_STATES) for _ in range(-(-count // size))]
        for entry in self.entries.values():
            state = _page_state(entry)
            for page in entry.pages:
                cells[page // size][state] += 1
        totals = tuple([sum(cell[index] for cell in cells) for index in range(len(PAGE_STATES))])
        shares = [tuple([100 * pages // size for pages in cell]) for cell in cells]
        return MemoryMap(count, size, PAGE_STATES, totals, shares)

    def statistics(self) -> dict[str, int]:
        """Return counters and gauges; a page has `page_rows` embedding rows."""
        return {
            "cache_hits": self._hits,
            "cache_misses": self._misses,
            "cache_entries": len(self.entries),
            "cache_evictions": self._evictions,
            "cache_preemptions": self._preemptions,
            "pages_total": self._limits.pages,
            "pages_free": len(self.free),
            "pages_evictable": self._evictable_pages,
        }

    def rebuild(self) -> None:
        queued = []
        for entry in self.entries.values():
            if entry.is_idle:
                self._evictable_pages += len(entry.pages)
            elif entry.phase is QUEUED:
                queued.append(entry)
        for entry in sorted(queued, key=attrgetter("order")):
            self.queue.put(entry)

    def check(self, live: Iterable[int], orphaned: Sequence[int]) -> None:
        """Assert that no page is lost, phases are consistent, and claiming requests are live."""
        alive = set(live)
        pages = [*self.free, *orphaned]
        for key, entry in self.entries.items():
            assert key == entry.item.key
            assert entry.claims.keys() <= alive, "a dead request claims an item"
            pages.extend(entry.pages)
            queued = entry.phase is QUEUED
            assert queued == (entry in self.queue), "queue and phase disagree"
            assert queued == (not entry.pages), "a queued entry has pages, or another has none"
            assert not (queued and not entry.claims), "a queued entry without a claim"
        assert sorted(pages) == list(range(self._limits.pages)), "pages lost or owned twice"
        idle = sorted(key for key, entry in self.entries.items() if entry.is_idle)
        assert sorted(self._order) == idle, "evictable entries are not the idle ones"
        assert self._evictable_pages == sum(len(self.entries[key].pages) for key in idle)

    def __iter__(self) -> Iterator[EmbeddingEntry]:
        return iter(self.entries.values())


def _ready_view(entry: EmbeddingEntry) -> ReadyEmbedding:
    return ReadyEmbedding(
        pages=len(entry.pages),
        tokens=entry.tokens or 0,
        requests=len(entry.claims),
        priority=entry.priority,
        arrived_ns=entry.arrived_ns,
        target_ns=entry.target_ns,
        tenant=entry.tenant,
    )


def _page_state(entry: EmbeddingEntry) -> int:
    if entry.phase is ENCODING:
        return 2
    if entry.pins:
        return 0
    return 1 if entry.claims else 3
