"""The generate stage: slots, KV blocks, chunked prefill, continuous batching, preemption by recompute.

**Cost follows change.** Ranks keep the running set, so a decode step names no request. The kernel touches a decoding
request only when something about it changes. The one thing that changes by itself is its length: every `block_size`
steps it grows into a new block. Which step that is follows from its length when it began to decode, so requests stand
in `block_size` buckets by the step (modulo `block_size`) in which they need a block, and a step looks at one bucket.
Tokens go into a log unread (`TokenLog`); ranks, which know their own last token, say who finished.

**One step ahead.** A decision may go out while the step before is still running. So a request may have finished in a
step that is out: the rank skips it by itself, and the kernel frees its slot when it hears. A preempted request has a
token coming in the step that is out: it *settles* until that came, then stands in line again at its old place.

**Blocks before slots.** A request is admitted with the blocks of all its known tokens, so prefill never runs out; only
decoding grows. When blocks run out, a victim leaves (`PreemptionPolicy`), never one older than the request that needs
the block, so the oldest always goes on.

Prior art: iteration-level scheduling (Orca, OSDI 2022), paged KV (vLLM, SOSP 2023), chunked prefill (Sarathi-Serve,
OSDI 2024). Rejected: planning every running request in every step (12 ms a step at 1,024 requests).
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from vsched.kernel.blocks import BlockPool, chain_hashes
from vsched.kernel.decisions import (
    ChunkItem,
    ChunkPlan,
    GenerateDecision,
    ItemPlace,
    Join,
    Leave,
    RequestData,
)
from vsched.kernel.encode import EncodeStage
from vsched.kernel.guard import GuardedOrder, PolicyFaults, ask_admission, ask_preemption
from vsched.kernel.queue import OrderedQueue
from vsched.kernel.request import Phase, ReadyEntry, RequestState, TokenLog
from vsched.kernel.sizes import KernelPolicies, Sizes
from vsched.policy import AdmissionView, PreemptionView, RunningView


class GenerateStage:
    """Requests from the moment their first chunk could run until they leave their slot."""

    def __init__(
        self, sizes: Sizes, policies: KernelPolicies, encode: EncodeStage, faults: PolicyFaults
    ) -> None:
        self._sizes = sizes
        self._policies = policies
        self._encode = encode
        self._faults = faults
        self.ready = False
        self.hold_until_ns: int | None = None
        self.planned = 0
        self.done = 0
        self.tokens_prefilled = 0
        self.tokens_decoded = 0
        self.tokens_cached = 0
        self.preemptions = 0
        self.admitted_total = 0
        self._queue: OrderedQueue[ReadyEntry] = OrderedQueue()
        self._entries: dict[int, ReadyEntry] = {}
        self._reset()

    def _reset(self) -> None:
        """Start with an empty group: no slot, block or step."""
        size = self._sizes.block_size
        self.pool = BlockPool(
            self._sizes.blocks, GuardedOrder(self._policies.prefix_eviction, self._faults)
        )
        self.slots: list[RequestState | None] = [None] * self._sizes.slots
        self._free_slots = list(range(self._sizes.slots - 1, -1, -1))
        self.prefilling: dict[int, RequestState] = {}
        self.decoding: dict[int, RequestState] = {}
        self._growth: list[dict[int, RequestState]] = [{} for _ in range(size)]
        self.settling: dict[int, tuple[RequestState, int, int]] = {}
        self._leaves: list[Leave] = []
        self._forgotten: list[int] = []
        self._reads: dict[int, list[tuple[RequestState, ChunkPlan]]] = {}
        self._firsts: dict[int, list[RequestState]] = {}
        self.log = TokenLog()
        self._blocked = False
        self.done = self.planned
        self.fallen: list[RequestState] = []

    # --- the waiting line ---

    def enqueue(self, state: RequestState) -> None:
        """Put a request that could run its first chunk into the line, at its place."""
        state.phase = Phase.READY
        entry = ReadyEntry(state, self._sizes.block_size)
        self._entries[state.number] = entry
        self._queue.put(entry)
        self._blocked = False

    def dequeue(self, state: RequestState) -> None:
        """Take a request out of the line."""
        self._queue.remove(self._entries.pop(state.number))
        self._blocked = False

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return len(self.prefilling) + len(self.decoding)

    def stands_in_line(self, state: RequestState) -> bool:
        """Return whether a request is in the waiting line."""
        entry = self._entries.get(state.number)
        return entry is not None and entry in self._queue

    @property
    def in_flight(self) -> int:
        """Steps whose results are not back."""
        return self.planned - self.done

    def hash_prompt(self, state: RequestState) -> None:
        """Compute the block hashes of a request's known tokens that it does not have yet."""
        if not self._sizes.prefix_cache:
            return
        hashes = state.hashes
        parent = hashes[-1] if hashes else _salt(state.request.cache_salt)
        hashes += chain_hashes(
            state.tokens,
            state.items,
            block_size=self._sizes.block_size,
            parent=parent,
            start_block=len(hashes),
        )

    def cached_prefix(self, state: RequestState) -> list[int]:
        """Return the cached blocks that a request could start from; at least one token stays to compute."""
        usable = (len(state.tokens) - 1) // self._sizes.block_size
        return self.pool.find(state.hashes[:usable])

    def chunk_stop(self, state: RequestState, start: int, budget: int) -> int:
        """Return where the next chunk from `start` ends: `start` when nothing can be done yet.

        The chunk is cut before an item whose embedding is not ready. A little text before such an
        item is not worth a step of its own, so the cut goes back to a block boundary; but never
        across rows of another item: an item that is ready must be consumed as far as possible, or
        its pages could keep out the very item that is waited for.
        """
        stop = min(len(state.tokens), start + self._sizes.chunk_tokens, start + budget)
        consumed = start
        for item in state.items:
            if item.offset >= stop:
                break
            if item.end <= start:
                continue
            if not self._encode.is_ready(item.key):
                cut = max(item.offset, start)
                return max(consumed, cut - cut % self._sizes.block_size)
            consumed = item.end
        return stop

    # --- planning a step ---

    def plan(self, now_ns: int) -> GenerateDecision | None:
        """Form the next step, or return None when there is nothing to run or enough is out already."""
        if not self.ready or self.in_flight >= self._sizes.generate_depth:
            return None
        if not (self.decoding or self.prefilling or self._queue):
            return None
        step = self.planned + 1
        grown = self._grow(step, now_ns)
        joined: list[Join] = []
        chunks: list[ChunkPlan] = []
        if self.prefilling or self._queue:
            budget = self._sizes.batch_tokens - len(self.decoding)
            runners = sorted(self.prefilling.values(), key=_order_of)
            for state in runners:
                budget -= self._chunk(state, step, budget, chunks)
            if self._queue and budget > 0 and not self._blocked:
                self._admit(step, budget, now_ns, joined, chunks)
        decodes = len(self.decoding) - len(self._firsts.get(step, ()))
        if not decodes and not chunks:
            return None
        self.planned = step
        self.tokens_decoded += decodes
        decision = GenerateDecision(step, self._forgotten, self._leaves, joined, grown, chunks)
        self._leaves, self._forgotten = [], []  # the decision owns the old lists now
        return decision

    def _grow(self, step: int, now_ns: int) -> list[int]:
        """Give a block to every decoding request that writes its next token into a new one."""
        bucket = self._growth[step % self._sizes.block_size]
        if not bucket:
            return []
        grown: list[int] = []
        pool = self.pool
        for state in list(bucket.values()):
            if state.slot < 0:
                continue  # preempted for one before it
            if pool.available == 0 and not self._make_room(state, now_ns):
                continue
            block = pool.allocate()
            state.blocks.append(block)
            grown.append(state.slot)
            grown.append(block)
        if self._leaves:
            gone = {leave.slot for leave in self._leaves}
            pairs = zip(grown[::2], grown[1::2], strict=True)
            grown = [value for pair in pairs if pair[0] not in gone for value in pair]
        return grown

    def _make_room(self, state: RequestState, now_ns: int) -> bool:
        """Preempt until a block is available; return False when `state` itself had to go."""
        while self.pool.available == 0:
            running = sorted([*self.prefilling.values(), *self.decoding.values()], key=_order_of)
            views = [self._running_view(other) for other in running]
            view = PreemptionView(now_ns=now_ns, running=views)
            victim = running[ask_preemption(self._policies.preemption, view, self._faults)]
            if victim.order < state.order:
                victim = state  # the older goes on, whatever the policy says: this is what ensures progress
            self.preempt(victim)
            if victim is state:
                return False
        return True

    def _running_view(self, state: RequestState) -> RunningView:
        decoded = self.planned - state.first_step + 1 if state.first_step >= 0 else 0
        return RunningView(
            tokens=state.computed + decoded,
            blocks=len(state.blocks),
            outputs=len(state.tokens) - state.prompt_length + decoded,
            priority=state.request.priority,
            arrived_ns=state.submitted_ns,
        )

    def _chunk(
        self, state: RequestState, step: int, budget: int, chunks: list[ChunkPlan]
    ) -> int:
        """Plan the next chunk of a prefilling request, if it can go on; return its tokens."""
        start = state.computed
        stop = self.chunk_stop(state, start, budget)
        if stop <= start:
            return 0
        items = [
            ChunkItem(item.offset, item.tokens, list(self._encode.read(item.key)))
            for item in state.items
            if item.offset < stop and item.end > start
        ]
        plan = ChunkPlan(state.slot, start, stop, items)
        chunks.append(plan)
        if items:
            self._reads.setdefault(step, []).append((state, plan))
        state.computed = stop
        size = self._sizes.block_size
        first, last = start // size, stop // size
        if state.hashes:
            self.pool.publish(state.blocks[first:last], state.hashes[first:last])
        self.tokens_prefilled += stop - start
        if stop == len(state.tokens):
            self._start_decoding(state, step)
        return stop - start

    def _start_decoding(self, state: RequestState, step: int) -> None:
        del self.prefilling[state.number]
        state.phase = Phase.DECODE
        state.first_step = step
        self.decoding[state.number] = state
        self._firsts.setdefault(step, []).append(state)
        # In step `step + j` it writes position `len(tokens) + j - 1`: a block's first when that is 0 modulo the size.
        state.bucket = (step + 1 - len(state.tokens)) % self._sizes.block_size
        self._growth[state.bucket][state.number] = state

    def _admit(
        self, step: int, budget: int, now_ns: int, joined: list[Join], chunks: list[ChunkPlan]
    ) -> None:
        """Let waiting requests join, as the admission policy proposes and slots and blocks allow."""
        if self.hold_until_ns is not None and now_ns < self.hold_until_ns:
            return
        if not self._free_slots:
            self._blocked = True
            return
        waiting = self._queue.entries
        view = AdmissionView(
            stage="generate",
            now_ns=now_ns,
            waiting=waiting,
            tokens_free=budget,
            entries_free=len(self._free_slots),
            blocks_free=self.pool.available,
            running=self.running,
            divisible=True,
            default_tokens=self._sizes.batch_tokens,
        )
        admission = ask_admission(self._policies.generate_admission, view, self._faults)
        self.hold_until_ns = admission.hold_until_ns
        for entry in [waiting[index] for index in admission.indices]:
            if budget <= 0 or not self._free_slots:
                return
            join = self._join(entry.state, budget, now_ns)
            if join is None:
                if entry.state.phase is Phase.READY:
                    self._blocked = True
                    return
                continue  # it waits for embeddings again: no reason to hold up those behind it
            joined.append(join)
            budget -= self._chunk(entry.state, step, budget, chunks)

    def _join(self, state: RequestState, budget: int, now_ns: int) -> Join | None:
        """Give a request a slot and blocks for all its known tokens, or change nothing and return None."""
        prefix = self.cached_prefix(state)
        computed = len(prefix) * self._sizes.block_size
        if self.chunk_stop(state, computed, budget) <= computed:
            # Its embeddings or its cached prefix went while it stood in line.
            self.dequeue(state)
            state.phase = Phase.ITEMS
            self.fallen.append(state)
            return None
        missing = self._sizes.blocks_for(len(state.tokens)) - len(prefix)
        if missing > self.pool.available - self.pool.cached_among(prefix):
            return None
        self.dequeue(state)
        self.pool.hold(prefix)
        state.blocks = prefix + [self.pool.allocate() for _ in range(missing)]
        state.slot = self._free_slots.pop()
        state.computed = computed
        state.phase = Phase.PREFILL
        self.slots[state.slot] = state
        self.prefilling[state.number] = state
        self.tokens_cached += computed
        self.admitted_total += 1
        if not state.admitted_ns:
            state.admitted_ns = now_ns
            state.cached_tokens = computed
        self.drop_claims_before(state, computed)
        data = None if state.known else _request_data(state)
        state.known = True
        return Join(
            state.number, state.slot, computed, len(state.tokens), list(state.blocks), data
        )

    def drop_claims_before(self, state: RequestState, computed: int) -> None:
        """The items before `computed` lie in the KV cache: their embeddings are not needed."""
        for index, item in enumerate(state.items):
            if item.end > computed:
                break
            if index in state.wanted:
                state.wanted.discard(index)
                release_item(self._encode, state, index)

    # --- results ---

    def finish_step(self, step: int, tokens: array[int], now_ns: int) -> list[RequestState]:
        """Take the batch of the oldest step that is out; return preempted requests that have settled by it."""
        assert step == self.done + 1, f"step {step} came back, {self.done + 1} was due"
        assert step <= self.planned, f"step {step} came back, {self.planned} is the last decided"
        self.done = step
        self.log.append(step, tokens)
        for state in self._firsts.pop(step, ()):
            if not state.first_token_ns:
                state.first_token_ns = now_ns
        for state, plan in self._reads.pop(step, ()):
            self._done_reading(state, plan)
            self.drop_claims_before(state, min(plan.stop, state.computed))
        settled = []
        if self.settling:
            for state, slot, last_step in list(self.settling.values()):
                if last_step <= step:
                    del self.settling[state.number]
                    self._gather(state, slot, last_step)
                    settled.append(state)
            self._trim_log()
        return settled

    def _done_reading(self, state: RequestState, plan: ChunkPlan) -> None:
        for item in state.items:
            if item.offset < plan.stop and item.end > plan.start:
                self._encode.done_reading(item.key)

    def _gather(self, state: RequestState, slot: int, last_step: int) -> None:
        """Add the outputs of the life that ends with `last_step` to a request's known tokens."""
        if state.first_step >= 0:
            state.tokens.extend(self.log.gather(slot, state.first_step, last_step))
            state.first_step = -1
        self.hash_prompt(state)

    # --- leaving ---

    def retire(self, state: RequestState) -> None:
        """Take a request that ended out of its slot; its KV stays findable as a prefix."""
        if state.slot >= 0:
            slot, computed = state.slot, state.computed
            if state.first_step >= 0:
                self._gather(state, slot, self.done)
                computed = len(state.tokens) - 1  # the last token was sampled, not yet computed
                full = min(computed // self._sizes.block_size, len(state.hashes))
                self.pool.publish(state.blocks[:full], state.hashes[:full])
            self._vacate(state, keep=False)
        elif state.known:
            self._forgotten.append(state.number)
        self.settling.pop(state.number, None)
        self._trim_log()

    def preempt(self, state: RequestState) -> None:
        """Take a running request out of its slot; it settles, then returns to its place in line."""
        slot = state.slot
        self.preemptions += 1
        state.preemptions += 1
        self._vacate(state, keep=True)
        state.phase = Phase.SETTLING
        if self.in_flight:
            self.settling[state.number] = (state, slot, self.planned)
        else:
            self._gather(state, slot, self.done)
            self.fallen.append(state)

    def yield_to_older(self) -> bool:
        """Preempt the youngest stalled prefill if an older request waits; return whether it was.

        Called when nothing moves. The prefill holds blocks and waits for an embedding whose pages
        the older request claims, which waits for the blocks: the younger must let go.
        """
        if not self._queue or not self.prefilling:
            return False
        youngest = max(self.prefilling.values(), key=_order_of)
        if youngest.order < self._queue.entries[0].order:
            return False
        self.preempt(youngest)
        return True

    def _vacate(self, state: RequestState, *, keep: bool) -> None:
        if state.phase is Phase.DECODE:
            del self._growth[state.bucket][state.number]
            del self.decoding[state.number]
        else:
            del self.prefilling[state.number]
        self._leaves.append(Leave(state.number, state.slot, keep))
        self.slots[state.slot] = None
        self._free_slots.append(state.slot)
        self.pool.release(state.blocks)
        state.blocks = []
        state.slot = -1
        state.computed = 0
        self._blocked = False

    def _trim_log(self) -> None:
        """Forget the token batches that no request needs; the first decoding request is the oldest."""
        needed = [state.first_step for state, _, _ in self.settling.values() if state.first_step >= 0]
        oldest = next(iter(self.decoding.values()), None)
        needed.append(self.done + 1 if oldest is None else oldest.first_step)
        self.log.forget_before(min(needed))

    def lose(self) -> list[RequestState]:
        """The group is gone with all it held: return every request that it knew, oldest first."""
        self.ready = False
        for reads in self._reads.values():
            for state, plan in reads:
                self._done_reading(state, plan)
        lost = sorted([*self.prefilling.values(), *self.decoding.values()], key=_order_of)
        for state in lost:
            state.losses += 1
            self._gather(state, state.slot, self.done)
            state.blocks, state.slot, state.computed = [], -1, 0
        for state, slot, _ in list(self.settling.values()):
            self._gather(state, slot, self.done)
            lost.append(state)
        self._reset()
        return sorted(lost, key=_order_of)

    # --- views ---

    def statistics(self) -> dict[str, int]:
        """Return counters and gauges of the stage."""
        return {
            "waiting": len(self._queue),
            "prefilling": len(self.prefilling),
            "decoding": len(self.decoding),
            "preempted": len(self.settling),
            "steps": self.done,
            "steps_in_flight": self.in_flight,
            "tokens_prefilled": self.tokens_prefilled,
            "tokens_decoded": self.tokens_decoded,
            "tokens_cached": self.tokens_cached,
            "preemptions": self.preemptions,
            "admitted": self.admitted_total,
            "blocks_total": self.pool.count,
            "blocks_held": self.pool.held,
            "blocks_available": self.pool.available,
            "prefix_evictions": self.pool.evictions,
            "slots_total": self._sizes.slots,
        }

    def check(self) -> None:
        """Assert that blocks and slots are conserved and that buckets hold just the decoding requests."""
        running = [*self.prefilling.values(), *self.decoding.values()]
        self.pool.check(state.blocks for state in running)
        for state in running:
            assert self.slots[state.slot] is state, "a slot and its request disagree"
        assert len(self._free_slots) + len(running) == len(self.slots), "a slot is lost"
        bucketed = sorted(number for bucket in self._growth for number in bucket)
        assert bucketed == sorted(self.decoding), "growth buckets and decoding requests disagree"
        for state in self.prefilling.values():
            assert len(state.blocks) == self._sizes.blocks_for(len(state.tokens))
        for state in self.decoding.values():
            decoded = self.planned - state.first_step
            written = len(state.tokens) + decoded
            assert len(state.blocks) == self._sizes.blocks_for(written), "blocks and length disagree"


def release_item(encode: EncodeStage, state: RequestState, index: int) -> None:
    """Drop a request's claim on one item; another of its items may have the same content."""
    key = state.items[index].key
    others = [other for other in sorted(state.wanted) if state.items[other].key == key]
    if others:
        encode.defer(key, state.number, (state.number, others[0]))
    else:
        encode.release(key, state.number)


def _order_of(state: RequestState) -> tuple[int, int]:
    return state.order


def _salt(cache_salt: str) -> bytes:
    return blake2b(cache_salt.encode(), digest_size=16, person=b"vsched.prefix").digest()


def _request_data(state: RequestState) -> RequestData:
    return RequestData(
        tokens=state.tokens.tobytes(),
        prompt_length=state.prompt_length,
        items=[ItemPlace(item.offset, item.tokens, item.grid) for item in state.items],
        sampling=state.request.sampling,
        stop_token_ids=state.stop_token_ids,
    )
