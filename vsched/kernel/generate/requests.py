"""The requests of a generate group: the waiting queue, and the running set with slots and blocks.

A decoding request needs a new block every `block_size` steps; its length when it began to decode determines which. So
decoding requests are in `block_size` buckets, by the step (modulo `block_size`) in which they need a block, and a step
looks at one bucket only. Requests whose steps may yield several tokens are in no bucket: see
`vsched.kernel.generate.drafts`.

The poison request, which crashes its group, is found without ending others. After a loss, all requests of the group run
again, since most losses have other reasons. A request that ran in two losses is a suspect. Suspects join one at a time,
each until it has yielded more tokens than before. If a group is lost while a suspect or a single request runs, that
request is the poison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import NoReturn, overload

from vsched.kernel.decisions import Leave
from vsched.kernel.generate.blocks import BlockPool
from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.request import DECODE, PREFILL, READY, RequestState
from vsched.policy import RunningView, WaitingEntry
from vsched.policy_host.snapshot import Restorable, Saved, SavedKeys
from vsched.policy_host.waiting import OrderedQueue
from vsched.probes import probe
from vsched.types import count_of


class ReadyEntry:
    """A waiting request, and its view for admission policies."""

    __slots__ = ("arrived_ns", "order", "state", "view")

    def __init__(self, state: RequestState, block_size: int) -> None:
        request = state.request
        self.state = state
        self.order = state.order
        self.arrived_ns = state.submitted_ns
        self.view = WaitingEntry(
            tokens=state.uncached,
            blocks=-(-len(state.tokens) // block_size),
            priority=request.priority,
            arrived_ns=state.submitted_ns,
            target_ns=state.target_ns,
            tenant=request.tenant,
            session=request.session,
            images=len(state.items),
            image_tokens=sum([count_of(item.runs) for item in state.items]) if state.items else 0,
            max_tokens=request.sampling.max_tokens,
            outputs=len(state.tokens) - state.prompt_length,
        )


class RequestQueue(OrderedQueue[ReadyEntry]):
    """Ready requests, in order of arrival.

    Attributes:
        blocked: Whether the first request has no room; nothing joins before something changes.
    """

    blocked: Saved[bool] = False

    def __init__(self, block_size: int, mark_dirty: Callable[[], None]) -> None:
        """Create an empty queue; `mark_dirty` is called when a request may have become able to join."""
        super().__init__()
        self._mark_dirty = mark_dirty
        self._block_size = block_size

    def enqueue(self, state: RequestState) -> None:
        """Insert a request at its place."""
        state.phase = READY
        self.put_new(ReadyEntry(state, self._block_size))
        self.unblock()

    def dequeue(self, state: RequestState, *, chosen_ns: int | None = None) -> None:
        """Remove a request, which joins at `chosen_ns` or leaves; it must be in the queue."""
        self.remove(self.entries[self.ahead_of(state.order)], chosen_ns=chosen_ns)
        self.unblock()

    def unblock(self) -> None:
        """Note that the first request may have room."""
        self.blocked = False
        self._mark_dirty()


class RunningViews(Sequence[RunningView]):
    """Views of running requests, built when the first one is read; valid during the call of a policy."""

    __slots__ = ("_all",)
    _all: Callable[[], tuple[RunningView, ...]]

    def __init__(self, running: RunningSet, planned: int) -> None:
        object.__setattr__(self, "_all", cache(partial(running.views, planned)))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a view cannot be changed: {name}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a view cannot be changed: {name}")

    @overload
    def __getitem__(self, index: int) -> RunningView: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RunningView]: ...
    def __getitem__(self, index: int | slice) -> RunningView | Sequence[RunningView]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


class RunningSet(Restorable):
    """Requests with a slot, prefilling or decoding, each in order of joining.

    Attributes:
        left: Requests that left their slots since the last decision.
        forgotten: Requests without a slot that ranks drop with the next decision.
        suspect: The running suspect, if any.
    """

    prefilling: SavedKeys[dict[int, RequestState]]
    decoding: SavedKeys[dict[int, RequestState]]
    _growth: SavedKeys[list[dict[int, RequestState]]]
    _free_slots: Saved[list[int]]
    left: Saved[list[Leave]]
    forgotten: Saved[list[int]]

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        self.pool = pool
        self.prefilling = {}
        self.decoding = {}
        self._slots = limits.slots
        self._block_size = limits.block_size
        self._counts_shared = limits.swap_blocks > 0
        self._free_slots = list(range(limits.slots - 1, -1, -1))
        self._growth = [{} for _ in range(limits.block_size)]
        self._first_steps = 0
        self.left = []
        self.forgotten = []
        self.suspect: RequestState | None = None

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def unannounced(self) -> set[int]:
        """Ended requests that ranks drop with the next decision."""
        return {leave.number for leave in self.left if not leave.keep} | set(self.forgotten)

    @property
    def slots_free(self) -> int:
        """Number of free slots."""
        return len(self._free_slots)

    def in_order(self) -> list[RequestState]:
        """Return all running requests, oldest first."""
        return sorted([*self.prefilling.values(), *self.decoding.values()], key=order_of)

    def views(self, planned: int) -> tuple[RunningView, ...]:
        """Return the views of all running requests, oldest first."""
        return tuple([self._view(state, planned) for state in self.in_order()])

    def _view(self, state: RequestState, planned: int) -> RunningView:
        """Return the view of a running request for preemption policies."""
        decoded = planned - state.decoding_since + 1 if state.first_step >= 0 else 0
        return RunningView(
            tokens=state.computed + decoded,
            blocks=len(state.blocks),
            outputs=len(state.tokens) - state.prompt_length + decoded,
            priority=state.request.priority,
            arrived_ns=state.submitted_ns,
            tenant=state.request.tenant,
            session=state.request.session,
            target_ns=state.target_ns,
            images=len(state.items),
            max_tokens=state.request.sampling.max_tokens,
            blocks_shared=self.pool.shared(state.blocks) if self._counts_shared else 0,
        )

    def tokens(self, planned: int) -> Iterable[tuple[str, int]]:
        """Yield the tenant and the computed tokens of each request."""
        for one in (*self.prefilling.values(), *self.decoding.values()):
            decoded = planned - one.decoding_since + 1 if one.first_step >= 0 else 0
            yield one.request.tenant, one.computed + decoded

    def assign_slot(self, state: RequestState, blocks: list[int], computed: int) -> None:
        """Give a request a free slot, and the blocks for all its known tokens."""
        state.slot = self._free_slots.pop()
        state.blocks = blocks
        state.computed = computed
        state.phase = PREFILL
        self.prefilling[state.number] = state
        if state.is_suspect:
            self.suspect = state

    def start_decoding(self, state: RequestState, step: int) -> None:
        """Let a request decode whose last chunk is in `step`: it yields a token in that and every later step."""
        del self.prefilling[state.number]
        state.phase = DECODE
        state.first_step = state.decoding_since = step
        self.decoding[state.number] = state
        self._first_steps += step
        self.enter_bucket(state)

    def written(self, state: RequestState, step: int) -> int:
        """Return the positions that a decoding request has written after this step, without drafts in flight."""
        return len(state.tokens) + step - state.decoding_since

    def swappable(self, state: RequestState, planned: int) -> int:
        """Return the number of tokens with KV once the steps in flight are done, or an upper bound of it."""
        if state.phase is not DECODE:
            return state.computed
        return min(self.written(state, planned) + state.unsettled, state.length_max)

    def enter_bucket(self, state: RequestState) -> None:
        """Put a decoding request into its bucket: it grows by one token a step, and has just the blocks it fills."""
        # In step `since + j` it writes position `len(tokens) + j - 1`: a block's first when 0 modulo the size.
        state.bucket = (state.decoding_since + 1 - len(state.tokens)) % self._block_size
        self._growth[state.bucket][state.number] = state

    def leave_bucket(self, state: RequestState) -> None:
        """Take a request whose steps may yield several tokens out of its bucket."""
        del self._growth[state.bucket][state.number]
        state.bucket = -1

    def gain(self, state: RequestState, tokens: int) -> None:
        """Account for extra tokens accepted from speculative decoding."""
        state.decoding_since -= tokens
        self._first_steps -= tokens

    def decoded(self, planned: int) -> int:
        """Return the number of tokens decoded since requests joined, with steps in flight."""
        return len(self.decoding) * (planned + 1) - self._first_steps

    def due(self, step: int) -> list[RequestState]:
        """Return the decoding requests that need a block in this step."""
        bucket = self._growth[step % self._block_size]
        return list(bucket.values()) if bucket else []

    def release_slot(
        self, state: RequestState, *, keep: bool, blocks_kept: int | None = None
    ) -> None:
        """Free a request's slot and blocks; with `keep`, ranks keep its tokens.

        The first `blocks_kept` blocks stay cached; None for all.
        """
        if state.phase is DECODE:
            if state.bucket >= 0:
                del self._growth[state.bucket][state.number]
            del self.decoding[state.number]
            self._first_steps -= state.decoding_since
        else:
            del self.prefilling[state.number]
        self.left.append(Leave(state.number, state.slot, keep))
        if self.suspect is state:
            self.suspect = None
        self._free_slots.append(state.slot)
        self.pool.release_blocks(state.blocks, kept=blocks_kept)
        state.blocks, state.slot, state.computed = [], -1, 0

    def without_left(self, grown: list[int]) -> list[int]:
        """Return (slot, block, slot, block, …) without the slots that requests left since the last decision."""
        left = {leave.slot for leave in self.left}
        pairs = list(zip(grown[::2], grown[1::2], strict=True))
        kept = [pair for pair in pairs if pair[0] not in left]
        if len(kept) < len(pairs):
            probe("generate.growth_taken_back")
        return [one for pair in kept for one in pair]

    def rebuild(self) -> None:
        for state in (*self.prefilling.values(), *self.decoding.values()):
            self.pool.add_holder(state.blocks)
            if state.is_suspect:
                self.suspect = state
        self._first_steps = sum(state.decoding_since for state in self.decoding.values())

    def check(self, planned: int) -> None:
        """Assert that no block or slot is lost, and that buckets have just the decoding requests."""
        running = self.in_order()
        self.pool.check(state.blocks for state in running)
        taken = sorted([*self._free_slots, *(state.slot for state in running)])
        assert taken == list(range(self._slots)), "a slot is lost, or two requests have it"
        bucketed = sorted(number for bucket in self._growth for number in bucket)
        exact = [number for number, state in self.decoding.items() if state.bucket >= 0]
        assert bucketed == sorted(exact), "growth buckets and decoding requests disagree"
        for state in running:
            written = len(state.tokens)
            if state.phase is DECODE:
                if state.bucket < 0:
                    continue  # `DraftGrants` checks those
                written = self.written(state, planned)
            assert len(state.blocks) == -(-written // self._block_size), (
                "blocks and length disagree"
            )


def order_of(state: RequestState) -> tuple[int, int]:
    """Return the queue order of a request."""
    return state.order
