"""A generate group: slots, KV blocks, chunked prefill, continuous batching, preemption.

**Cost follows change.** Ranks keep the running set, so a decode step names no request. The kernel handles a decoding
request only when something about it changes. Its length changes in every step, but `RunningSet` knows the steps in
which it needs a block. Tokens are logged unread: ranks know the last token, and detect finished requests.

**One step ahead.** Step n + 1 is planned while step n runs:

    ranks       |<------------------ step n ------------------>|<--------- step n + 1 --------->|
    kernel               plan n + 1                             result n
    finishes             (the plan still includes it)           slot freed; ranks skip it in n + 1
    preempted            slot and blocks freed                  token of n taken; queued at its old place

**All blocks at admission.** A request joins with the blocks for all its known tokens, so prefill never runs out of
blocks, only decoding does. Then a victim is preempted (`RequestPolicy`), never one older than the request that needs
the block, so the oldest always progresses. The victim is recomputed, or continues with its blocks in `SwapSpace`.

**Several tokens a step.** With speculative decoding, steps in flight may yield several tokens: see `DraftGrants`.

Prior art: iteration-level scheduling (Orca, OSDI 2022), paged KV (vLLM, SOSP 2023), chunked prefill (Sarathi-Serve,
OSDI 2024). Rejected: planning every running request in every step, which takes 12 ms at 1,024 requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import cast

from vsched.kernel.decisions import ChunkPlan, GenerateDecision, Join
from vsched.kernel.encode.embedding_cache import EmbeddingCache
from vsched.kernel.events import Stepped
from vsched.kernel.generate.blocks import BlockPool, StateSnapshots, SwapSpace
from vsched.kernel.generate.drafts import NO_DRAFTS, DraftGrants, count_drafts
from vsched.kernel.generate.measures import Measures
from vsched.kernel.generate.requests import RequestQueue, RunningSet, RunningViews, order_of
from vsched.kernel.generate.steps import (
    NOTHING_PLANNED,
    ChunkRead,
    InFlightSteps,
    PlanResult,
    StepPlan,
)
from vsched.kernel.groups import DirtyGroups, Group, unready_reason
from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.live import MemoryMap
from vsched.kernel.request import DECODE, ITEMS, PREEMPTED, READY, Phase, RequestState
from vsched.policy import (
    Admission,
    AdmissionView,
    CachePolicy,
    InsertionView,
    Preemption,
    PreemptionView,
    PrefillView,
    RequestPolicy,
    StepView,
)
from vsched.policy.measured import Measured, Measurements, SwapTime
from vsched.policy_host.eviction import GuardedOrder
from vsched.policy_host.seats import PolicySeat, PolicySeats
from vsched.policy_host.snapshot import Saved
from vsched.policy_host.step_times import (
    NONE_ADVANCES,
    StepTimeModel,
    decide_shares,
    limit_share,
)
from vsched.probes import probe

CLEARING_TOKENS = 2
"""New tokens after which a suspect (a request that ran in two losses of its group) is cleared."""
_OTHER_ADMISSION = "Remedy: other fields of generate.admission, or another policy"
COUNTED = (
    *("tokens_prefilled", "tokens_decoded", "tokens_cached", "preemptions", "admitted"),
    *("tokens_drafted", "drafts_accepted"),
    *("swapped_out", "swapped_in", "swap_blocks_out", "swap_blocks_in"),
)
"""Counters of a group, by their names in its statistics."""


class GenerateGroup(Group):
    """A generate group and its requests, from their routing until they leave it.

    `requests` are all live ones of the scheduler, by number.
    """

    step_times: Saved[StepTimeModel]
    measures: Saved[Measures]
    queue: Saved[RequestQueue]
    _counts: Saved[dict[str, int]]
    _in_flight: Saved[InFlightSteps]
    _pool: Saved[BlockPool]
    _snapshots: Saved[StateSnapshots]
    _swap: Saved[SwapSpace]
    _running: Saved[RunningSet]
    _drafts: Saved[DraftGrants]
    _front_first: Saved[bool]  # the oldest waiting request joins next, whatever the policy says
    _helped: Saved[int] = 0  # number of the request that joined last because it was overdue
    _left_out_ns: Saved[int] = 0  # longest time that others passed a prefilling request

    def __init__(
        self,
        name: str,
        index: int,
        limits: SchedulerLimits,
        cache: EmbeddingCache,
        requests: Mapping[int, RequestState],
        seats: PolicySeats,
        dirty: DirtyGroups,
    ) -> None:
        self.index = index
        self._dirty = dirty
        super().__init__(name)
        self._limits = limits
        self._prefix_eviction = cast("CachePolicy", seats.policies.by_table["generate.eviction"])
        self._admission = seats.add_seat(f"{name}.admission")
        self._preemption = seats.add_seat(f"{name}.preemption")
        self._drafting = seats.add_seat(f"{name}.drafting")
        self._insertion = seats.add_seat(f"{name}.insertion")
        self._step = seats.add_seat(f"{name}.step")
        self._cache = cache
        self._requests = requests
        self._faults = seats.faults
        self.step_times = StepTimeModel(
            limits.step_target_ns,
            limits.step_target_ratio,
            limits.block_size,
            limits.prefill_target_ns,
        )
        self._counts = dict.fromkeys(COUNTED, 0)
        self._known_tokens = self._members = 0
        self.measures = Measures()
        self.measured: Measured = Measurements()  # set once all groups are there
        self._in_flight = InFlightSteps(0, requests, self.measures)
        self.queue = RequestQueue(limits.block_size, self.mark_dirty)
        self._reset(limits.blocks)

    def _reset(self, blocks: int) -> None:
        """Empty the group, with `blocks` free KV blocks: no slot, held block or step."""
        order = partial(GuardedOrder[bytes], self._prefix_eviction, self._faults)
        self._pool = BlockPool(blocks, order())
        self._snapshots = StateSnapshots(self._limits, order)
        self._swap = SwapSpace(self._limits)
        self._running = RunningSet(self._limits, self._pool)
        self._drafts = DraftGrants(
            self._limits, self._drafting, self._running, lambda: self.measured
        )
        self._in_flight = InFlightSteps(self._in_flight.planned, self._requests, self.measures)
        self.queue.unblock()
        self._front_first = False
        self._requeued: list[RequestState] = []

    def replace_eviction(self, policy: CachePolicy) -> None:
        """Let another policy order the eviction of cached blocks and snapshots."""
        self._prefix_eviction = policy
        self._pool.replace_order(policy)
        self._snapshots.replace_order(policy)

    # --- which requests are its own ---

    def accepts(self, state: RequestState) -> bool:
        """Return True if `state` can join; a draining group takes only requests that ran there when it was lost."""
        return self.open or (self.ready and state.losses > 0)

    def add(self, state: RequestState) -> None:
        """Add a request to the load of the group."""
        self._members += 1
        state.counted = len(state.tokens)
        self._known_tokens += state.counted

    def dequeue(self, state: RequestState) -> None:
        """Remove a request from the queue, if it is there."""
        if state.phase is READY:
            self.queue.dequeue(state)

    def detach(self, state: RequestState) -> None:
        """Remove a request without a slot from the group."""
        self.dequeue(state)
        self._swap.free_slots(state.number)
        if state.known:
            self._running.forgotten.append(state.number)
            state.known = False
        self._subtract(state)

    def _subtract(self, state: RequestState) -> None:
        self._members -= 1
        self._known_tokens -= state.counted

    def _count_outputs(self, state: RequestState) -> None:
        """Count the outputs of a request that left its slot as known tokens."""
        self._subtract(state)
        self.add(state)
        state.extend_hashes(self._limits.block_size)

    def cached_tokens(self, state: RequestState) -> int:
        """Number of tokens of a request that are cached or swapped out; at least one token remains to be computed."""
        found = self._cached_blocks(state)
        return self._swap.reach(state, self._snapshots.usable(state.hashes, len(found)))

    def _cached_blocks(self, state: RequestState) -> list[int]:
        if state.wants_prompt_logprobs:
            return []
        usable = (len(state.tokens) - 1) // self._limits.block_size
        return self._pool.find(state.hashes[:usable])

    def can_start(self, state: RequestState, computed: int) -> bool:
        """Return True if a chunk from `computed` can run, with the embeddings that are ready."""
        tokens = self._limits.batch_tokens
        return self._chunk_stop(state, computed, tokens, room=tokens) > computed

    def _chunk_stop(self, state: RequestState, start: int, budget: int, *, room: int) -> int:
        """Return the end of the next chunk from `start`; `start` if it must wait.

        A chunk has at most `budget` tokens, unless it begins with or in an atom, a range that no chunk may cut: it has
        the whole atom if that fits into `room`, the tokens left in the step. It ends before any later atom that does
        not fit.

        A chunk ends before an item whose embedding is not ready. A little text before that item is not worth a step, so
        the chunk then ends at a block boundary, but not within another item: ready items must be consumed as far as
        possible, or their pages could keep out the missing item.
        """
        limits, is_ready = self._limits, self._cache.is_ready
        stop = min(len(state.tokens), start + limits.chunk_tokens, start + budget)
        atomic = limits.item_atomic or limits.prompt_atomic
        if atomic and (atom := state.cut_atom(stop, limits)) is not None:
            probe("generate.chunk_holds_atom")
            first, end = atom
            stop = first if first > start else end
            if stop > start + room:
                return start
        consumed = start
        for item in state.items:
            if item.offset >= stop:
                break
            end = item.end
            if end <= start:
                continue
            if not is_ready(item.key):
                cut = max(item.offset, start)
                shortened = max(consumed, cut - cut % limits.block_size)
                if atomic and state.cut_atom(shortened, limits) is not None:
                    return start
                if start < shortened < cut:
                    probe("generate.chunk_cut_to_block")
                return shortened
            consumed = end
        return stop

    # --- planning ---

    def plan(self, now_ns: int) -> PlanResult:
        """Plan the next step."""
        in_flight = self._in_flight
        ahead = self.steps_in_flight
        if not self.ready or ahead >= self._limits.generate_depth:
            return NOTHING_PLANNED
        running, entries = self._running, self.queue.entries
        if not (running.decoding or running.prefilling or entries or self._requeued):
            return NOTHING_PLANNED
        step, more = in_flight.planned + 1, ahead + 1 < self._limits.generate_depth
        if not ahead:
            self.measures.since_ns = now_ns
        if self._drafts.active:
            self._drafts.renew_grants(step, now_ns)
        grown = self._grow(step, now_ns)
        able: Sequence[RequestState] = ()  # prefilling requests that do not wait for an embedding
        if running.prefilling:
            able = [
                one
                for one in sorted(running.prefilling.values(), key=order_of)
                if self.can_start(one, one.computed)
            ]
        plan = None  # in the steady state, with decodes only, there is no budget to share
        if able or entries:
            preemptions = self._counts["preemptions"]
            plan = self._fill(step, able, now_ns)
            if self._counts["preemptions"] > preemptions:
                # without slots of requests preempted for joining ones
                grown = running.without_left(grown)
        # Requests with their last chunk in this step are in `decoding` already.
        decodes = len(running.decoding) - (len(in_flight.firsts.get(step, ())) if plan else 0)
        chunks, prefilled = (plan.chunks, plan.prefilled) if plan else ((), ())
        sent = self._send(step, decodes, grown, plan) if decodes or chunks else None
        if sent is None:  # a policy may decide otherwise in the next call
            queue = self.queue  # a request may be held back only by the admission policy
            may_join = entries and not queue.blocked and queue.held_until(now_ns) is None
            more = bool(able or may_join)
        requeued, self._requeued = self._requeued, []
        return PlanResult(sent, requeued, prefilled, more)

    def _fill(self, step: int, able: Sequence[RequestState], now_ns: int) -> StepPlan:
        """Share the budget of a step among prefilling requests, then among joining ones."""
        running, joins = self._running, bool(self.queue.entries) and not self.queue.blocked
        decode_tokens = len(running.decoding) + self._drafts.tokens
        budget = self.step_times.budget_for(
            self._limits.batch_tokens - decode_tokens,
            decodes=decode_tokens,
            share=self._limit_share,
        )
        plan = StepPlan(step, budget)
        # Without prefills, the policy still limits the time that joining requests take next to decodes.
        if able or (joins and decode_tokens and budget.time_ns is not None):
            self._prefill(able, plan, decode_tokens, joins, now_ns)
        if joins and not budget.spent:
            self._admit(plan, now_ns)
        return plan

    def _prefill(
        self,
        able: Sequence[RequestState],
        plan: StepPlan,
        decode_tokens: int,
        joins: bool,
        now_ns: int,
    ) -> None:
        """Let requests advance as the step policy says, first those that were left out for too long.

        `able` are in order of arrival. If nothing decodes and the answer leads to no chunk, all advance: a share that
        ends before a missing embedding must not stop the others.
        """
        budget, times, seat = plan.budget, self.step_times, self._step
        token_ns, pair_ns = times.costs
        late_ns = now_ns - self._limits.passed_over_ns
        late = [
            index
            for index, state in enumerate(able)
            if state.advanced_ns <= late_ns and state.admitted_ns <= late_ns
        ]
        view = StepView(
            now_ns=now_ns,
            prefilling=tuple([_prefill_view(state) for state in able]),
            waiting=len(self.queue) if joins and self.queue.held_until(now_ns) is None else 0,
            decodes=decode_tokens,
            tokens_free=budget.tokens,
            time_ns=budget.time_ns,
            decode_ns=times.decode_ns(decode_tokens) if decode_tokens else 0.0,
            token_ns=token_ns,
            pair_ns=pair_ns,
            chunk_min=self._limits.block_size,
            overdue=tuple(late),
            measured=self.measured,
            state=seat.state,
        )
        decided = decide_shares(seat, view, budget)
        if decided.left_out:
            advanced = [max(able[i].advanced_ns, able[i].admitted_ns) for i in decided.left_out]
            self._left_out_ns = max(self._left_out_ns, now_ns - min(advanced))
        for index, tokens_max in decided.shares.items():
            self._advance_prefill(able[index], tokens_max, plan, now_ns)
        if not (decode_tokens or plan.chunks or decided.unlimited):
            seat.overrule(NONE_ADVANCES)
            for state in able:
                self._advance_prefill(state, None, plan, now_ns)

    def _advance_prefill(
        self, state: RequestState, tokens_max: int | None, plan: StepPlan, now_ns: int
    ) -> None:
        left = len(state.tokens) - state.computed
        fitting, room = plan.budget.tokens_at(state.computed, left), plan.budget.tokens
        tokens = fitting if tokens_max is None else min(fitting, tokens_max)
        stop = self._chunk_stop(state, state.computed, tokens, room=room)
        self._chunk(state, stop, plan, now_ns)

    def _send(
        self, step: int, decodes: int, grown: list[int], plan: StepPlan | None = None
    ) -> GenerateDecision:
        """Note a step as in flight, and return its decision; without a plan, it has decodes only."""
        self.step_times.note_step(step, decodes, plan.budget if plan is not None else None)
        self._front_first = False
        self._in_flight.planned = step
        if self._snapshots.written:
            self._snapshots.publish()
        self._counts["tokens_decoded"] += decodes
        running, drafts, swap = self._running, self._drafts, self._swap
        forgotten, left = running.forgotten, running.left
        running.forgotten, running.left = [], []
        if plan is None and not (drafts.active or swap.pending):
            return GenerateDecision(step, forgotten, left, [], grown)
        granted = drafts.note_drafts(step) if drafts.active else []
        swaps = swap.take_copies() if swap.pending else None
        joined, chunks = (plan.joined, plan.chunks) if plan is not None else ([], [])
        return GenerateDecision(step, forgotten, left, joined, grown, chunks, granted, swaps)

    def _grow(self, step: int, now_ns: int) -> list[int]:
        """Allocate a block for each decoding request whose next token needs one."""
        grown: list[int] = []
        due, drafts, pool = self._running.due(step), self._drafts, self._pool
        if not (due or drafts.active):
            return grown
        preempted = self._counts["preemptions"]
        for state in due:
            if state.slot < 0:
                probe("generate.preempted_before_growth")
                continue
            if pool.available == 0 and not self._make_room(state, now_ns):
                continue
            block = pool.allocate()
            state.blocks.append(block)
            grown.append(state.slot)
            grown.append(block)
        if drafts.active:
            grown += drafts.grow(step, lambda state: self._make_room(state, now_ns))
        if self._counts["preemptions"] > preempted:
            # A request that got its block may have been preempted for a later one.
            return self._running.without_left(grown)
        return grown

    def _make_room(self, state: RequestState, now_ns: int) -> bool:
        """Preempt until a block is available; return False if `state` itself was preempted."""
        while self._pool.available == 0:
            running = self._running.in_order()
            view = PreemptionView(
                now_ns=now_ns,
                running=self._running.views(self._in_flight.planned),
                in_need=running.index(state),
                swap_blocks_free=self._swap.free,
                block_tokens=self._limits.block_size,
                measured=self.measured,
                state=self._preemption.state,
            )
            chosen: Preemption = self._preemption.decide(view, len(running))
            victim = running[chosen.victim]
            if victim.order < state.order:
                self._preemption.overrule("the victim was older than the request in need")
                victim = state  # whatever the policy says, the older request continues: this ensures progress
            self._preempt(victim, swap_by=self._preemption if chosen.mode == "swap" else None)
            if victim is state:
                probe("generate.preempted_itself")
                return False
        return True

    def _chunk(self, state: RequestState, stop: int, plan: StepPlan, now_ns: int) -> None:
        """Add the next chunk of a prefilling request to a step; it ends at `stop`, and may be empty."""
        start, step = state.computed, plan.step
        if stop <= start:
            return
        state.advanced_ns = now_ns
        plan.budget.add_chunk(start, stop - start)
        met = [one for one in state.items if one.offset < stop and one.end > start]
        items = [self._cache.pin(item) for item in met]
        writes = self._snapshots.snapshots_to_write(state, stop)
        plan.chunks.append(ChunkPlan(state.slot, start, stop, items, writes))
        plan.prefilled.append(state)
        if met:
            read = ChunkRead(state.number, stop, [item.key for item in met])
            self._in_flight.reads.setdefault(step, []).append(read)
        state.computed = stop
        size = self._limits.block_size
        first, last = start // size, stop // size
        if state.hashes:
            self._pool.publish(state.blocks[first:last], state.hashes[first:last])
        self._counts["tokens_prefilled"] += stop - start
        if stop == len(state.tokens):
            self._running.start_decoding(state, step)
            self._in_flight.firsts.setdefault(step, []).append(state.number)
            self._drafts.began(state, step, now_ns)

    def _admit(self, plan: StepPlan, now_ns: int) -> None:
        """Let waiting requests join, as the admission policy, slots and blocks allow."""
        queue, running = self.queue, self._running
        if queue.held_until(now_ns) is not None:
            return
        preempts = cast("RequestPolicy", self._admission.policy).preempts
        queue.blocked = not (running.slots_free or preempts)
        waiting, preempted = queue.entries, self._in_flight.oldest_preempted()
        if preempted is not None:
            # It returns in the next step: its blocks are not for younger requests.
            waiting = [entry for entry in waiting if entry.order < preempted]
        if queue.blocked or not waiting:
            return
        shown, overdue = queue.shown(), self._overdue(len(waiting), now_ns)
        in_order = running.in_order() if preempts else []
        eligible: tuple[int, ...] = ()
        if preempts and overdue is None:
            eligible = tuple([i for i, one in enumerate(in_order) if self._may_yield(one)])
        if not (running.slots_free or eligible or self._front_first):
            return
        view = AdmissionView(
            stage="generate",
            now_ns=now_ns,
            waiting=shown if preempted is None else shown[: len(waiting)],
            tokens_free=plan.budget.tokens,
            entries_free=running.slots_free,
            blocks_free=self._pool.available,
            running=len(running),
            divisible=True,
            default_tokens=self._limits.batch_tokens,
            block_tokens=self._limits.block_size,
            running_requests=RunningViews(running, self._in_flight.planned),
            eligible=eligible,
            overdue=overdue,
            hold_max_ns=self._limits.passed_over_ns,
            measured=self.measured,
            state=self._admission.state,
        )
        admission = Admission((0,))
        if not self._front_first:
            need = self._limits.blocks_for(len(waiting[0].state.tokens))
            admission, helped = queue.admit(
                self._admission, view, waiting, fits=need <= self._pool.available
            )
            if helped and overdue is not None:
                self._helped = waiting[overdue].state.number
        victims = [in_order[index] for index in reversed(admission.preempt)]
        for state in [waiting[index].state for index in admission.indices]:
            if plan.budget.spent or not (running.slots_free or victims):
                return
            if running.suspect is not None and state.is_suspect:
                probe("generate.suspect_waits")
                self._admission.overrule("a request that ran when its group was lost runs alone")
                continue
            victim = None if running.slots_free else victims.pop()
            self._join(state, plan, now_ns, victim, swap=admission.mode == "swap")
            if state.phase is READY:
                return
            # A request that is not ready any more does not hold up those after it.

    def _may_yield(self, state: RequestState) -> bool:
        """Return True if a policy may preempt a running request for a waiting one.

        It got a token since it joined, so each turn makes progress. It did not take its slot from another, so two
        requests cannot take turns at each other's expense. And all such preemptions together cost it limited time.
        """
        return (
            0 <= state.first_step <= self._in_flight.done
            and not state.took_slot
            and state.away_ns < self._limits.passed_over_ns
        )

    def _overdue(self, count: int, now_ns: int) -> int | None:
        """Return the index of the waiting request, of the first `count`, that goes first whatever the policy says.

        One at a time: while one runs that went first so, none does. Else a policy that reserves slots for some requests
        could reserve none while others wait for long.
        """
        overdue = self.queue.overdue(now_ns, self._limits.passed_over_ns)
        if overdue is None or overdue >= count:
            return None
        helped = self._requests.get(self._helped)
        return None if helped is not None and helped.slot >= 0 else overdue

    def _join(
        self,
        state: RequestState,
        plan: StepPlan,
        now_ns: int,
        victim: RequestState | None = None,
        *,
        swap: bool = False,
    ) -> None:
        """Give a request a slot, blocks for all its known tokens, and its first chunk, if there is room.

        If no slot is free, `victim` is preempted for it.
        """
        budget = plan.budget
        found = self._cached_blocks(state)
        prefix = found[: self._snapshots.usable(state.hashes, len(found))]
        computed = self._swap.reach(state, len(prefix))
        if state.items and not self.can_start(state, computed):
            # Its embeddings or its cached prefix were evicted while it waited.
            probe("generate.embedding_gone")
            self.queue.dequeue(state)
            state.phase = ITEMS
            self._requeued.append(state)
            return
        tokens = budget.tokens_at(computed, len(state.tokens) - computed)
        stop = self._chunk_stop(state, computed, tokens, room=budget.tokens)
        if stop <= computed:
            # An atom does not fit into the rest of this step. No request overtakes it until the next.
            probe("generate.atom_waits")
            return
        missing = self._limits.blocks_for(len(state.tokens)) - len(prefix)
        holders = self._pool.holders
        available = self._pool.available - sum([not holders[block] for block in prefix])
        if victim is not None:
            freed = {block for block in victim.blocks if holders[block] == 1}
            available += len(freed.difference(prefix))
        if missing > available:
            self.queue.blocked = True
            return
        self.queue.dequeue(state, chosen_ns=now_ns)
        restored = self._snapshots.snapshot_to_read(state, found=len(found), used=len(prefix))
        self._pool.hold_blocks(prefix)
        if victim is not None:
            self._preempt(victim, swap_by=self._admission if swap else None)
            victim.yielded_ns = now_ns
        blocks = prefix + self._pool.allocate_blocks(missing)
        copied = self._swap.swap_in(state, blocks, cached=len(prefix), computed=computed)
        if copied:
            self._counts["swapped_in"] += 1
            self._counts["swap_blocks_in"] += copied
            if state.hashes:
                full = slice(len(prefix), computed // self._limits.block_size)
                self._pool.publish(blocks[full], state.hashes[full])
        self._running.assign_slot(state, blocks, computed)
        self._counts["tokens_cached"] += len(prefix) * self._limits.block_size
        self._counts["admitted"] += 1
        state.took_slot = victim is not None
        if state.yielded_ns:
            state.away_ns += now_ns - state.yielded_ns
            state.yielded_ns = 0
        if not state.admitted_ns:
            state.admitted_ns = now_ns
            state.cached_tokens = computed
        data = None if state.known else state.data()
        state.known = True
        known = len(state.tokens)
        plan.joined.append(
            Join(state.number, state.slot, computed, known, list(state.blocks), data, restored)
        )
        self._chunk(state, stop, plan, now_ns)
        # After the chunk, whose items may have the content of an earlier one.
        self._cache.release_before(state, computed)

    # --- results ---

    def complete_step(self, event: Stepped, now_ns: int) -> list[RequestState]:
        """Take the result of the oldest step in flight; return the preempted requests that waited for it."""
        step, busy_ns, drafted = event.step, event.busy_ns - event.swap_ns, event.drafted
        drafts = count_drafts(drafted) if drafted else NO_DRAFTS
        composition = self.step_times.learn(step, busy_ns, drafts[0])
        measures, in_flight = self.measures, self._in_flight
        measures.steps.append((now_ns, busy_ns, now_ns - measures.since_ns, composition, drafts))
        measures.since_ns = now_ns
        if event.swap_ns:
            measures.swaps.append(SwapTime(now_ns, event.swap_ns, event.swap_blocks))
        reads = in_flight.complete_step(step, event.tokens, now_ns, drafted)
        self.mark_dirty()
        if self._drafts.active:
            self._drafts.settle_drafts(step, drafted, self._counts)
        for read in reads:
            self._cache.unpin(read.keys)
            state = self._requests.get(read.number)
            if state is not None:
                self._cache.release_before(state, min(read.stop, state.computed))
            else:
                probe("generate.reader_ended")
        suspect = self._running.suspect
        if suspect is not None and 0 <= suspect.first_step <= step + 1 - CLEARING_TOKENS:
            probe("generate.suspect_cleared")
            suspect.losses = 0
            self._running.suspect = None
        if not in_flight.preempted:
            return []
        requeueable = self._in_flight.take_requeueable()
        for state in requeueable:
            self._count_outputs(state)
        return requeueable

    # --- leaving ---

    def remove(self, state: RequestState, now_ns: int) -> None:
        """Remove a request that ended; the insertion policy decides which of its blocks stay cached."""
        self.dequeue(state)
        if state.slot >= 0:
            slot, computed = state.slot, state.computed
            if state.first_step >= 0:
                self._in_flight.gather(state, slot)
                self._count_outputs(state)
                computed = len(state.tokens) - 1  # the last token was sampled, not yet computed
                full = min(computed // self._limits.block_size, len(state.hashes))
                self._pool.publish(state.blocks[:full], state.hashes[:full])
            kept = self._blocks_kept(state, computed, now_ns)
            self._release_slot(state, keep=False, blocks_kept=kept)
        elif state.known:
            self._running.forgotten.append(state.number)
        if self._swap.free_slots(state.number):
            probe("generate.swap_ended")
        if self._in_flight.preempted.pop(state.number, None) is not None:
            probe("generate.settling_ended")
        self._subtract(state)
        # Requests begin to decode in order of steps, so the first in the set is the oldest.
        self._in_flight.trim(next(iter(self._running.decoding.values()), None))

    def _blocks_kept(self, state: RequestState, computed: int, now_ns: int) -> int | None:
        """Return the number of leading blocks of an ended request that stay cached; None for all.

        `computed` of its tokens have KV. The insertion policy decides at the end of a request only: before, its blocks
        are published for others, and for itself after a preemption. Blocks that it found in the cache always stay.
        """
        limits, seat = self._limits, self._insertion
        full = min(computed // limits.block_size, len(state.hashes))
        found = min(state.cached_tokens // limits.block_size, full)
        if not (limits.prefix_cache and limits.shares_blocks) or full <= found:
            return None
        view = InsertionView(
            now_ns=now_ns,
            hashes=tuple(state.hashes[:full]),
            prompt_blocks=min(state.prompt_length // limits.block_size, full),
            found=found,
            block_tokens=limits.block_size,
            prompt_tokens=state.prompt_length,
            output_tokens=len(state.tokens) - state.prompt_length,
            items=len(state.items),
            priority=state.request.priority,
            tenant=state.request.tenant,
            session=state.request.session,
            measured=self.measured,
            state=seat.state,
        )
        kept: int = seat.decide(view, full)
        if kept < found:
            seat.overrule("blocks that were found in the cache stay")
            kept = found
        return kept if kept < full else None

    def _release_slot(
        self, state: RequestState, *, keep: bool, blocks_kept: int | None = None
    ) -> None:
        self._drafts.end_grant(state)
        self._running.release_slot(state, keep=keep, blocks_kept=blocks_kept)
        self.queue.unblock()

    def _preempt(self, state: RequestState, *, swap_by: PolicySeat | None = None) -> None:
        """Preempt a running request, swapped if a seat says so; it is requeued once its last step has completed."""
        slot = state.slot
        if swap_by is not None:
            self._swap_out(state, swap_by)
        self._counts["preemptions"] += 1
        state.preemptions += 1
        self._release_slot(state, keep=True)
        state.phase = PREEMPTED
        if self.steps_in_flight:  # they yield tokens of the request
            self._in_flight.preempted[state.number] = (slot, self._in_flight.planned)
        else:
            self._in_flight.gather(state, slot)
            self._count_outputs(state)
            self._requeued.append(state)

    def _swap_out(self, state: RequestState, seat: PolicySeat) -> None:
        """Copy the blocks of a request that leaves its slot to swap space, if there is room."""
        free, tokens = self._swap.free, self._running.swappable(state, self._in_flight.planned)
        if self._swap.swap_out(state, tokens, self._pool):
            self._counts["swapped_out"] += 1
            self._counts["swap_blocks_out"] += free - self._swap.free
        else:
            seat.overrule("the victim was recomputed instead of swapped")

    def unblock_oldest(self) -> bool:
        """Let the oldest waiting request join before all others, whatever the policy says; return False if it cannot.

        Called when nothing makes progress: a younger request with a slot waits for an embedding, and the oldest waiting
        one claims its pages. If the oldest has no room, the youngest prefill that waits is preempted.
        """
        if not self.queue:
            return False
        self.queue.unblock()
        if not self._front_first:
            self._front_first = True
            return True
        youngest = max(self._running.prefilling.values(), key=order_of, default=None)
        if youngest is None or youngest.order < self.queue.entries[0].order:
            return False
        probe("generate.stalled_prefill_preempted")
        self._preempt(youngest)
        return True

    def lose_requests(self, *, blame: bool) -> tuple[list[RequestState], RequestState | None]:
        """Empty a lost group; return the requests that ran there, oldest first, and the poison request.

        That is the request to blame for the loss; None if it is not certain.
        """
        self.step_times.drop_planned()
        for reads in self._in_flight.reads.values():
            probe("generate.lost_while_reading")
            for read in reads:
                self._cache.unpin(read.keys)
        if self._in_flight.preempted:
            probe("generate.lost_while_settling")
        if self._swap:
            probe("generate.lost_while_swapped")
        lost, suspect = self._running.in_order(), self._running.suspect
        if suspect is not None:
            probe("generate.lost_in_quarantine")
        elif len(lost) == 1:
            suspect = lost[0]
        for state in lost:
            state.losses += blame
            self._drafts.end_grant(state)
            self._in_flight.gather(state, state.slot)
            state.blocks, state.slot, state.computed = [], -1, 0
        lost += self._in_flight.take_requeueable(crashed=True)
        for state in lost:
            self._count_outputs(state)
        self._reset(self._pool.count)
        poison = suspect if blame and suspect is not None and suspect.is_suspect else None
        return sorted(lost, key=order_of), poison

    def resize(self, blocks: int) -> None:
        """Continue with `blocks` KV blocks; the group restarted, and no block is in use."""
        if blocks != self._pool.count:
            self._reset(blocks)

    # --- views ---

    def mark_dirty(self) -> None:
        self._dirty.mark(self.index)

    @property
    def idle(self) -> bool:
        return not (self._running or self.steps_in_flight or self._in_flight.preempted)

    @property
    def steps_in_flight(self) -> int:
        """Steps that have not completed."""
        return self._in_flight.planned - self._in_flight.done

    @property
    def decoding(self) -> int:
        """Number of decoding requests."""
        return len(self._running.decoding)

    @property
    def running(self) -> list[RequestState]:
        """Requests that hold a slot, oldest first."""
        return self._running.in_order()

    @property
    def slots_held(self) -> int:
        """Number of slots in use."""
        return len(self._running)

    def slots_held_from(self, priority: int) -> int:
        """Return the number of slots that requests of this priority or a higher one hold."""
        running = self._running
        held = (*running.prefilling.values(), *running.decoding.values())
        return sum(one.request.priority >= priority for one in held)

    @property
    def blocks_total(self) -> int:
        return self._pool.count

    @property
    def load_tokens(self) -> int:
        """Tokens of all its requests, prompts and outputs, waiting and running."""
        return self._known_tokens + self._running.decoded(self._in_flight.planned)

    @property
    def unannounced(self) -> set[int]:
        """Ended requests that ranks drop with the next decision."""
        return self._running.unannounced

    @property
    def _limit_share(self) -> float:
        decoding = len(self._running.decoding)
        return limit_share(decoding, self._members - decoding)

    @property
    def decode_slack_ns(self) -> int:
        """Maximum time that other work may keep the decoding requests from their next step; 0 for no limit."""
        # If none decodes yet, a request may begin to at any time.
        return int(self.step_times.left_ns(self.decoding or 1, self._limit_share))

    def explain(self, state: RequestState, now_ns: int) -> str:
        """Return the phase of one of its requests and the reason for its wait, in words for operators."""
        match state.phase:
            case Phase.ITEMS:
                missing = [
                    index
                    for index in sorted(state.wanted)
                    if not self._cache.is_ready(state.items[index].key)
                ]
                why = f"items {missing} of {len(state.items)} are not encoded yet"
            case Phase.READY:
                why = self._queue_reason(state, now_ns)
            case Phase.PREFILL:
                why = f"{state.computed} of {len(state.tokens)} tokens in slot {state.slot}"
            case Phase.DECODE:
                tokens = self.outputs(state) - len(state.tokens) + state.prompt_length
                why = f"{tokens} tokens since it joined slot {state.slot}"
            case Phase.SUSPENDED:
                why = unready_reason(self.name, self.status)
            case _:
                return str(state.phase)
        return f"{state.phase}: {why}"

    def _queue_reason(self, state: RequestState, now_ns: int) -> str:
        """Return why a request of the queue has not joined."""
        queue, available = self.queue, self._pool.available
        ahead = queue.ahead_of(state.order)
        behind = f"; requests ahead of it: {ahead}" if ahead else ""
        if not self.ready:
            return unready_reason(self.name, self.status, behind)
        if (until_ns := queue.held_until(now_ns)) is not None:
            wait_s = (until_ns - now_ns) / 1e9
            return f"the admission policy holds the queue for another {wait_s:.1f} s{behind}. {_OTHER_ADMISSION}"
        if not self._running.slots_free:
            slots = self._limits.slots
            return f"all {slots} slots are taken{behind}. Remedy: more generate.slots or replicas"
        first = queue.entries[0].state if queue.entries else state
        need = self._limits.blocks_for(len(first.tokens))
        if need > available:
            subject = "it" if first is state else "the first in the queue"
            return (
                f"{subject} needs {need} KV blocks, {available} of {self._pool.count} are available"
                f"{behind}. Remedy: a larger KV cache (generate.memory), or more replicas"
            )
        if self._running.suspect is not None and state.is_suspect:
            return (
                "it ran each time the group was lost, so it runs alone, after another such request. "
                "Remedy: the log has the reason of the losses"
            )
        limit_s = self._limits.passed_over_ns / 1e9
        return (
            f"the admission policy lets others go first, for at most {limit_s:g} s (policies.passed_over_max_s)"
            f"{behind}. {_OTHER_ADMISSION}"
        )

    def outputs(self, state: RequestState) -> int:
        """Output tokens of a request so far."""
        decoded = self._in_flight.done - state.decoding_since + 1 if state.phase is DECODE else 0
        return len(state.tokens) - state.prompt_length + max(0, decoded)

    def block_map(self) -> MemoryMap:
        """Return the states of all KV blocks."""
        return self._pool.map()

    def running_tokens(self) -> Iterable[tuple[str, int]]:
        """Return the tenant and the tokens so far of each running request, with those of steps in flight."""
        return self._running.tokens(self._in_flight.planned)

    def counts(self) -> dict[str, int]:
        """Return the counters, and the sizes of the KV cache."""
        return {**self._counts, **self._pool.statistics(), **self._swap.statistics()}

    def statistics(self) -> dict[str, int]:
        """Return counters and gauges of the group."""
        return {
            "load_tokens": self.load_tokens,
            "waiting": len(self.queue),
            "prefilling": len(self._running.prefilling),
            "decoding": len(self._running.decoding),
            "preempted": len(self._in_flight.preempted),
            "steps": self._in_flight.done,
            "steps_in_flight": self.steps_in_flight,
            **self.counts(),
            "slots_total": self._limits.slots,
        }

    @property
    def passed_longest_ns(self) -> int:
        """Longest time that policies let other requests pass one of its requests, which waited or was prefilled."""
        return max(self.queue.passed_longest_ns, self._left_out_ns)

    # --- snapshots ---

    def rebuild(self) -> None:
        super().rebuild()
        self._pool.trim()
        queue = self.queue
        blocked, hold_until_ns = queue.blocked, queue.hold_until_ns
        for state in self._requests.values():
            if state.replica == self.index:
                self._members += 1
                self._known_tokens += state.counted
                if state.phase is READY:
                    queue.enqueue(state)
        queue.blocked, queue.hold_until_ns = blocked, hold_until_ns

    def check(self, own: Sequence[RequestState]) -> None:
        """Assert that queue, load and running set are consistent; `own` are the requests of this group."""
        self._running.check(self._in_flight.planned)
        self._drafts.check(self._in_flight.planned)
        assert not self._requeued, "requests are on their way to the queue"
        self._snapshots.check()
        self._swap.check([state.number for state in own if state.slot < 0])
        assert self._members == len(own), "requests are miscounted"
        assert self._known_tokens == sum(state.counted for state in own), "load is miscounted"
        ready = [state.number for state in own if state.phase is READY]
        assert ready == [entry.state.number for entry in self.queue.entries], "the queue is wrong"


def _prefill_view(state: RequestState) -> PrefillView:
    return PrefillView(
        tokens=len(state.tokens) - state.computed,
        computed=state.computed,
        priority=state.request.priority,
        arrived_ns=state.submitted_ns,
        joined_ns=state.admitted_ns,
        target_ns=state.target_ns,
        tenant=state.request.tenant,
        session=state.request.session,
        max_tokens=state.request.sampling.max_tokens,
    )
