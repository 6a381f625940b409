"""The generate stage: slots, KV blocks, chunked prefill, continuous batching, preemption by recompute.

**Cost follows change.** Ranks keep the running set, so a decode step names no request. The kernel touches a decoding
request only when something about it changes. The one thing that changes by itself is its length, and `RunningSet`
knows in which step that needs a block. Tokens go into a log unread; ranks know their own last token, and who finished.

**One step ahead.** A decision may go out while the step before is still running. So a request may have finished in a
step that is out: the rank skips it by itself, and the kernel frees its slot when it hears. A preempted request has a
token coming in the step that is out: it *settles* until that came, then stands in line again at its old place.

**Blocks before slots.** A request is admitted with the blocks of all its known tokens, so prefill never runs out; only
decoding grows. When blocks run out, a victim leaves (`PreemptionPolicy`), never one older than the request that needs
the block, so the oldest always goes on.

Prior art: iteration-level scheduling (Orca, OSDI 2022), paged KV (vLLM, SOSP 2023), chunked prefill (Sarathi-Serve,
OSDI 2024). Rejected: planning every running request in every step, which takes 12 ms at 1,024 requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from vsched.kernel.decisions import ChunkPlan, GenerateDecision, Join
from vsched.kernel.encode.stage import EncodeStage
from vsched.kernel.events import Stepped
from vsched.kernel.generate.blocks import BlockPool
from vsched.kernel.generate.chunks import chunk_stop, drop_claims_before, read_items
from vsched.kernel.generate.in_flight import InFlightSteps
from vsched.kernel.generate.quarantine import Quarantine
from vsched.kernel.generate.running import RunningSet, order_of
from vsched.kernel.generate.step_budget import Pace, StepBudget, StepPlan
from vsched.kernel.generate.waiting import Line, Load
from vsched.kernel.groups import Group
from vsched.kernel.limits import KernelPolicies, SchedulerLimits
from vsched.kernel.policy_calls import GuardedOrder, PolicyFaults, ask_admission, ask_preemption
from vsched.kernel.request import Phase, RequestState
from vsched.policy import Admission, AdmissionView, PreemptionView

COUNTED = ("tokens_prefilled", "tokens_decoded", "tokens_cached", "preemptions", "admitted")


class GenerateGroup(Group):
    """One generate group: its requests from the moment their first chunk could run until they leave their slot."""

    def __init__(
        self,
        name: str,
        limits: SchedulerLimits,
        policies: KernelPolicies,
        encode: EncodeStage,
        faults: PolicyFaults,
    ) -> None:
        super().__init__(name)
        self._limits = limits
        self._policies = policies
        self._encode = encode
        self._faults = faults
        self.flight = InFlightSteps(0)
        self.pace = Pace(limits.step_target_ns, limits.step_target_ratio, limits.block_size)
        self.counts = dict.fromkeys(COUNTED, 0)
        self.line = Line(limits.block_size)
        self.load = Load()
        self._probation = Quarantine()
        self._reset()

    def _reset(self) -> None:
        """Start with an empty group: no slot, block or step."""
        order: GuardedOrder[bytes] = GuardedOrder(self._policies.prefix_eviction, self._faults)
        self.pool = BlockPool(self._limits.blocks, order)
        self.running = RunningSet(self._limits, self.pool)
        self.flight = InFlightSteps(self.flight.planned)
        self.line.blocked = False
        self._front_first = False
        self.fallen: list[RequestState] = []

    # --- whose requests these are ---

    @property
    def idle(self) -> bool:
        return not (self.running or self.flight.out or self.flight.settling)

    def takes(self, state: RequestState) -> bool:
        """Return whether one of its requests can join: while it drains, only those that it must not leave to others."""
        return self.open or (self.ready and state.losses > 0)

    @property
    def load_tokens(self) -> int:
        """Tokens of all its requests, prompts and outputs, waiting and running (E9)."""
        return self.load.known_tokens + self.running.decoded(self.flight.planned)

    def let_go(self, state: RequestState) -> None:
        """Give a request that holds no slot away."""
        if state.phase is Phase.READY:
            self.line.remove(state)
        if state.known:
            self.running.forget(state)
            state.known = False
        self.load.drop(state)

    def _take_down(self, state: RequestState) -> None:
        """A life ended, and its outputs became known tokens."""
        self.load.recount(state)
        if self._limits.prefix_cache:
            state.extend_hashes(self._limits.block_size)

    def cached_prefix(self, state: RequestState) -> list[int]:
        """Return the cached blocks that a request could start from; at least one token stays to compute."""
        usable = (len(state.tokens) - 1) // self._limits.block_size
        return self.pool.find(state.hashes[:usable])

    def chunk_stop(self, state: RequestState, start: int, budget: int) -> int:
        """Return where the next chunk from `start` ends: `start` when nothing can be done yet."""
        return chunk_stop(state, start, budget, limits=self._limits, encode=self._encode)

    # --- planning a step ---

    def plan(self, now_ns: int) -> GenerateDecision | None:
        """Form the next step, or return None when there is nothing to run or enough is out already."""
        if not self.ready or self.flight.out >= self._limits.generate_depth:
            return None
        running, entries = self.running, self.line.entries
        if not (running.decoding or running.prefilling or entries):
            return None
        step = self.flight.planned + 1
        grown = self._grow(step, now_ns)
        if not (running.prefilling or entries):
            # The steady case: nothing but decodes, and no budget to share out.
            return self._send(step, len(running.decoding), grown) if running.decoding else None
        decoding = len(running.decoding)
        budget = self.pace.start_step(self._limits.batch_tokens - decoding, decodes=decoding)
        draft = StepPlan(step, budget)
        for state in sorted(running.prefilling.values(), key=order_of):
            self._chunk(state, draft)
        if entries and not (budget.spent or self.line.blocked):
            self._admit(draft, now_ns)
        decodes = len(running.decoding) - self.flight.firsts(step)
        return self._send(step, decodes, grown, draft) if decodes or draft.chunks else None

    def _send(
        self, step: int, decodes: int, grown: list[int], draft: StepPlan | None = None
    ) -> GenerateDecision:
        """Note a step as out, and return the decision that sends it there; without a draft, all it does is decode."""
        self.pace.note(step, draft.budget if draft is not None else None, decodes=decodes)
        self._front_first = False
        self.flight.planned = step
        self.counts["tokens_decoded"] += decodes
        forgotten, left = self.running.take_changes()
        if draft is None:
            return GenerateDecision(step, forgotten, left, [], grown)
        return GenerateDecision(step, forgotten, left, draft.joined, grown, draft.chunks)

    def _grow(self, step: int, now_ns: int) -> list[int]:
        """Give a block to every decoding request that writes its next token into a new one."""
        grown: list[int] = []
        due = self.running.due(step)
        if not due:
            return grown
        pool = self.pool
        preempted = self.counts["preemptions"]
        for state in due:
            if state.slot < 0:
                continue  # preempted for one before it
            if pool.available == 0 and not self._make_room(state, now_ns):
                continue
            block = pool.allocate()
            state.blocks.append(block)
            grown.append(state.slot)
            grown.append(block)
        if self.counts["preemptions"] > preempted:
            # One that had grown already may have been preempted for one after it.
            pairs = zip(grown[::2], grown[1::2], strict=True)
            grown = [one for pair in pairs if not self.running.left_since(pair[0]) for one in pair]
        return grown

    def _make_room(self, state: RequestState, now_ns: int) -> bool:
        """Preempt until a block is available; return False when `state` itself had to go."""
        while self.pool.available == 0:
            running = self.running.in_order()
            views = [self.running.view(other, self.flight.planned) for other in running]
            view = PreemptionView(now_ns=now_ns, running=views)
            victim = running[ask_preemption(self._policies.preemption, view, self._faults)]
            if victim.order < state.order:
                victim = state  # the older goes on, whatever the policy says: this is what ensures progress
            self.preempt(victim)
            if victim is state:
                return False
        return True

    def _chunk(self, state: RequestState, draft: StepPlan) -> None:
        """Plan the next chunk of a prefilling request, if it can go on."""
        start, step = state.computed, draft.step
        stop = self.chunk_stop(state, start, draft.budget.tokens_at(start))
        if stop <= start:
            return
        draft.budget.take(start, stop - start)
        items = read_items(state, start, stop, encode=self._encode)
        plan = ChunkPlan(state.slot, start, stop, items)
        draft.chunks.append(plan)
        if items:
            self.flight.note_read(step, state, plan)
        state.computed = stop
        size = self._limits.block_size
        first, last = start // size, stop // size
        if state.hashes:
            self.pool.publish(state.blocks[first:last], state.hashes[first:last])
        self.counts["tokens_prefilled"] += stop - start
        if stop == len(state.tokens):
            self.running.start_decoding(state, step)
            self.flight.note_first(step, state)

    def _admit(self, draft: StepPlan, now_ns: int) -> None:
        """Let waiting requests join, as the admission policy proposes and slots and blocks allow."""
        if self.line.hold_until_ns is not None and now_ns < self.line.hold_until_ns:
            return
        self.line.blocked = not self.running.slots_free
        waiting, settling = self.line.entries, self.flight.oldest_settling()
        if settling is not None:
            # It comes back next step: what it gave up is not for those behind it.
            waiting = [entry for entry in waiting if entry.order < settling]
        if self.line.blocked or not waiting:
            return
        view = AdmissionView(
            stage="generate",
            now_ns=now_ns,
            waiting=waiting,
            tokens_free=draft.budget.tokens,
            entries_free=self.running.slots_free,
            blocks_free=self.pool.available,
            running=len(self.running),
            divisible=True,
            default_tokens=self._limits.batch_tokens,
        )
        admission = Admission((0,))
        if not self._front_first:
            admission = ask_admission(self._policies.generate_admission, view, self._faults)
        self.line.hold_until_ns = admission.hold_until_ns
        for entry in [waiting[index] for index in admission.indices]:
            if draft.budget.spent or not self.running.slots_free:
                return
            if not self._probation.admits(entry.state):
                continue
            join = self._join(entry.state, draft.budget, now_ns)
            if join is not None:
                draft.joined.append(join)
                self._chunk(entry.state, draft)
                # Only now: the chunk may read the content of an earlier item once more.
                drop_claims_before(entry.state, join.computed, encode=self._encode)
            elif entry.state.phase is Phase.READY:
                self.line.blocked = True
                return
            # Else it waits for embeddings again: no reason to hold up those behind it.

    def _join(self, state: RequestState, budget: StepBudget, now_ns: int) -> Join | None:
        """Give a request a slot and blocks for all its known tokens, or change nothing and return None."""
        prefix = self.cached_prefix(state)
        computed = len(prefix) * self._limits.block_size
        if self.chunk_stop(state, computed, budget.tokens_at(computed)) <= computed:
            # Its embeddings or its cached prefix went while it stood in line.
            self.line.remove(state)
            state.phase = Phase.ITEMS
            self.fallen.append(state)
            return None
        missing = self._limits.blocks_for(len(state.tokens)) - len(prefix)
        if missing > self.pool.available - self.pool.cached_among(prefix):
            return None
        self.line.remove(state)
        self.pool.hold(prefix)
        blocks = prefix + self.pool.take(missing)
        self.running.seat(state, blocks, computed)
        self._probation.begin(state)
        self.counts["tokens_cached"] += computed
        self.counts["admitted"] += 1
        if not state.admitted_ns:
            state.admitted_ns = now_ns
            state.cached_tokens = computed
        data = None if state.known else state.data()
        state.known = True
        return Join(state.number, state.slot, computed, len(state.tokens), list(state.blocks), data)

    # --- results ---

    def finish_step(self, event: Stepped, now_ns: int) -> list[RequestState]:
        """Take the batch of the oldest step that is out; return preempted requests that it settles."""
        self.pace.learn(event.step, event.busy_ns)
        for state, plan in self.flight.land(event.step, event.tokens, now_ns):
            self._encode.done_reading(state, plan.start, plan.stop)
            drop_claims_before(state, min(plan.stop, state.computed), encode=self._encode)
        self._probation.review(self.flight.done)
        if not self.flight.settling:
            return []
        settled = self.flight.take_settled()
        for state in settled:
            self._take_down(state)
        self._trim_log()
        return settled

    # --- leaving ---

    def retire(self, state: RequestState) -> None:
        """Take a request that ended out of its slot; its KV stays findable as a prefix."""
        if state.slot >= 0:
            slot, computed = state.slot, state.computed
            if state.first_step >= 0:
                self.flight.gather(state, slot)
                self._take_down(state)
                computed = len(state.tokens) - 1  # the last token was sampled, not yet computed
                full = min(computed // self._limits.block_size, len(state.hashes))
                self.pool.publish(state.blocks[:full], state.hashes[:full])
            self._vacate(state, keep=False)
        elif state.known:
            self.running.forget(state)
        self.flight.unsettle(state)
        self.load.drop(state)
        self._trim_log()

    def _vacate(self, state: RequestState, *, keep: bool) -> None:
        self.running.vacate(state, keep=keep)
        self._probation.end(state)
        self.line.blocked = False

    def preempt(self, state: RequestState) -> None:
        """Take a running request out of its slot; it settles, then returns to its place in line."""
        slot = state.slot
        self.counts["preemptions"] += 1
        state.preemptions += 1
        self._vacate(state, keep=True)
        state.phase = Phase.SETTLING
        if self.flight.out:
            self.flight.settle(state, slot)
        else:
            self.flight.gather(state, slot)
            self._take_down(state)
            self.fallen.append(state)

    def favour_front(self) -> bool:
        """Make way for the front of the line, whatever the policy says; return whether that may help.

        Called when nothing moves: a younger request with a slot waits for an embedding whose pages the front claims. So
        the front joins before all others, and the youngest stalled prefill lets go if it has no room.
        """
        if not self.line:
            return False
        self.line.blocked = False
        if not self._front_first:
            self._front_first = True
            return True
        youngest = max(self.running.prefilling.values(), key=order_of, default=None)
        if youngest is None or youngest.order < self.line.entries[0].order:
            return False
        self.preempt(youngest)
        return True

    def _trim_log(self) -> None:
        # Requests begin to decode in order of steps, so the first in the set is the oldest.
        self.flight.trim(next(iter(self.running.decoding.values()), None))

    def lose(self, *, blame: bool) -> tuple[list[RequestState], RequestState | None]:
        """The group is gone with all it held: return every request that had run there, oldest first, and the culprit.

        That is the request to blame for the loss, None where it is not certain.
        """
        self.pace.lose()
        for state, plan in self.flight.crash():
            self._encode.done_reading(state, plan.start, plan.stop)
        lost = self.running.in_order()
        culprit = self._probation.blame(lost) if blame else None
        for state in lost:
            self._probation.end(state)
            self.flight.gather(state, state.slot)
            state.blocks, state.slot, state.computed = [], -1, 0
        lost += self.flight.take_settled(crashed=True)
        for state in lost:
            self._take_down(state)
        self._reset()
        return sorted(lost, key=order_of), culprit

    # --- views ---

    def statistics(self) -> dict[str, int]:
        """Return counters and gauges of the group."""
        return {
            "load_tokens": self.load_tokens,
            "waiting": len(self.line),
            "prefilling": len(self.running.prefilling),
            "decoding": len(self.running.decoding),
            "preempted": self.flight.settling,
            "steps": self.flight.done,
            "steps_in_flight": self.flight.out,
            **self.counts,
            **self.pool.statistics(),
            "slots_total": self._limits.slots,
        }

    def check(self, own: Sequence[RequestState]) -> None:
        """Assert that line, load and running set are consistent; `own` are the requests of this group."""
        self.running.check(self.flight.planned)
        assert self.load.known_tokens == sum(state.counted for state in own), "load is miscounted"
        ready = [state.number for state in own if state.phase is Phase.READY]
        assert ready == [entry.state.number for entry in self.line.entries], "the line is wrong"
