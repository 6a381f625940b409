"""Speculative decoding in the kernel: draft grants, and the blocks for several tokens a step.

Ranks draft tokens, run them through the model after the last token, and accept those that the model would have
generated. The number of accepted tokens is known when the step is done, but the next step was decided before. So a
request with a grant is *bounded*: the kernel knows only its maximum length. It leaves the buckets of the running set,
and gets the blocks for that length and for the drafts of each step. When its grant has ended, no draft is in flight,
and it has filled its blocks, it returns to a bucket, and costs nothing again.

Blocks: a request always gets the blocks for tokens that it may have written already, as for its next token. Blocks for
new drafts are allocated only while one is left for each running request; ranks draft only as far as the blocks reach.

Rows: drafts use the rows of free slots, so no step samples more rows than there are slots, for which memory was
measured. When requests join, the youngest grants end.

Rejected: leaving a request out of the next step until its length is known. That needs no bounds, but halves the number
of steps of a request that runs alone, where drafts help most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from vsched.kernel.decisions import DraftGrant
from vsched.kernel.events import Drafted
from vsched.kernel.generate.requests import RunningSet
from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.request import RequestState
from vsched.policy import Draft, DraftingView
from vsched.policy.measured import Measured
from vsched.policy_host.seats import PolicySeat
from vsched.policy_host.snapshot import Restorable, Saved, SavedKeys

RETRY_STEPS = 64
"""Steps until a policy is called again, if there were no free rows for a grant without an end."""

NO_DRAFTS = 0, 0


def count_drafts(drafted: Sequence[Drafted]) -> tuple[int, int]:
    """Return the number of drafts in a step, and of accepted ones."""
    return sum(one.drafts for one in drafted), sum(len(one.tokens) for one in drafted)


class DraftGrants(Restorable):
    """The draft grants of the decoding requests of a group.

    Attributes:
        tokens: Maximum number of drafts in the next step, of all requests.
        active: Whether steps need any of this; otherwise it costs nothing.
    """

    _bounded: SavedKeys[dict[int, RequestState]]
    _asks: Saved[dict[int, list[int]]]
    _in_flight: Saved[dict[int, list[tuple[int, int]]]]
    _changes: Saved[dict[int, DraftGrant]]

    def __init__(
        self,
        limits: SchedulerLimits,
        seat: PolicySeat,
        running: RunningSet,
        measured: Callable[[], Measured],
    ) -> None:
        self._measured = measured
        self.tokens = 0
        self._limits = limits
        self._seat = seat
        self._running = running
        self._bounded = {}
        self._asks = {}
        self._in_flight = {}
        self._changes = {}
        self.active = False  # no property, because every step reads it

    def _is_pending(self) -> bool:
        return bool(self._bounded or self._asks or self._in_flight or self._changes)

    # --- before a step ---

    def renew_grants(self, step: int, now_ns: int) -> None:
        """Renew grants that end before this step, and return requests of known length to their buckets."""
        for number in self._asks.pop(step, ()):
            state = self._running.decoding.get(number)
            if state is not None and state.requested_in == step:
                self._ask(state, step, now_ns)
        for state in list(self._bounded.values()):
            if self._is_settled(state, step):
                del self._bounded[state.number]
                self._running.enter_bucket(state)

    def began(self, state: RequestState, step: int, now_ns: int) -> None:
        """Ask for a grant for a request with its first token in this step; it is drafted for from the next step on."""
        if self._limits.drafts:
            self._ask(state, step + 1, now_ns)

    def grow(self, step: int, make_room: Callable[[RequestState], bool]) -> list[int]:
        """Give bounded requests the blocks that this step may write; return (slot, block, slot, block, …).

        `make_room` preempts until a block is available; it returns False if the request itself was preempted.
        """
        grown: list[int] = []
        pool, running = self._running.pool, self._running
        for state in list(self._bounded.values()):
            if state.slot < 0:
                continue
            owed = self._limits.blocks_for(self._bound(state, step))
            tokens = state.granted.tokens if state.granted is not None else 0
            wanted = self._limits.blocks_for(self._bound(state, step, drafts=tokens))
            while len(state.blocks) < wanted:
                if len(state.blocks) >= owed:
                    if pool.available <= len(running):
                        break
                elif pool.available == 0 and not make_room(state):
                    break
                block = pool.allocate()
                state.blocks.append(block)
                grown += (state.slot, block)
        return grown

    def note_drafts(self, step: int) -> list[DraftGrant]:
        """Note the drafts of a step; return the changed grants for its decision."""
        excess = len(self._running) + self.tokens - self._limits.slots
        for state in reversed(list(self._bounded.values())) if excess > 0 and self.tokens else ():
            if excess > 0 and state.granted is not None and state.granted.tokens:
                excess -= state.granted.tokens
                self._allow(state, replace(state.granted, tokens=0, steps=RETRY_STEPS), step)
        noted = [
            (number, state.granted.tokens)
            for number, state in self._bounded.items()
            if state.granted is not None and state.granted.tokens and state.first_step < step
        ]
        for number, tokens in noted:
            self._bounded[number].unsettled += tokens
        if noted:
            self._in_flight[step] = noted
        changes = list(self._changes.values())
        self._changes.clear()
        self.active = self._is_pending()
        return changes

    def _bound(self, state: RequestState, step: int, *, drafts: int = 0) -> int:
        """Return the maximum number of positions that it has written after this step."""
        most = self._running.written(state, step) + state.unsettled + drafts
        return min(most, state.length_max)

    def _is_settled(self, state: RequestState, step: int) -> bool:
        if state.unsettled or (state.granted is not None and state.granted.tokens):
            return False
        written = self._running.written(state, step - 1)
        return len(state.blocks) == self._limits.blocks_for(written)

    def _ask(self, state: RequestState, step: int, now_ns: int) -> None:
        last = state.granted
        free = self._limits.slots - len(self._running) - self.tokens
        free = max(free + (last.tokens if last is not None else 0), 0)
        view = DraftingView(
            now_ns=now_ns,
            held=bool(state.request.sampling.grammar),
            outputs=self._running.written(state, step) - state.prompt_length,
            outputs_max=state.request.sampling.max_tokens,
            running=len(self._running),
            rows_free=free,
            last=last,
            drafted=state.drafted,
            accepted=state.accepted,
            model=self._limits.draft_model,
            priority=state.request.priority,
            tenant=state.request.tenant,
            session=state.request.session,
            measured=self._measured(),
            state=self._seat.state,
        )
        found: Draft = self._seat.decide(view)
        if found.tokens > free:
            self._seat.overrule("more tokens than rows_free")
            found = replace(found, tokens=free, steps=found.steps or RETRY_STEPS)
        self._allow(state, found, step)

    def _allow(self, state: RequestState, draft: Draft, step: int) -> None:
        before = state.granted or Draft()
        state.granted, state.drafted, state.accepted = draft, 0, 0
        self.tokens += draft.tokens - before.tokens
        sources, other = (draft.ngram, draft.model), (before.ngram, before.model)
        if draft.tokens != before.tokens or (draft.tokens and sources != other):
            self._changes[state.slot] = DraftGrant(state.slot, draft.tokens, *sources)
        if draft.tokens and state.bucket >= 0:
            self._running.leave_bucket(state)
            self._bounded[state.number] = state
        state.requested_in = step + draft.steps if draft.steps else 0
        if state.requested_in:
            self._asks.setdefault(state.requested_in, []).append(state.number)
        self.active = True

    # --- after a step ---

    def settle_drafts(self, step: int, drafted: Sequence[Drafted], counts: dict[str, int]) -> None:
        """Take the accepted drafts of a step, and count them."""
        granted = self._in_flight.pop(step, None)
        if granted is None:
            return
        results = {one.slot: one for one in drafted}
        for number, tokens in granted:
            state = self._bounded.get(number)
            if state is None:
                continue
            state.unsettled -= tokens
            found = results.get(state.slot)
            if found is not None:
                assert len(found.tokens) <= found.drafts <= tokens, (
                    "a rank drafted more than granted"
                )
                state.drafted += found.drafts
                state.accepted += len(found.tokens)
                self._running.gain(state, len(found.tokens))
        drafts, accepted = count_drafts(drafted)
        counts["tokens_drafted"] += drafts
        counts["drafts_accepted"] += accepted
        counts["tokens_decoded"] += accepted

    def end_grant(self, state: RequestState) -> None:
        """End the grant of a request that leaves its slot."""
        if state.granted is not None:
            self.tokens -= state.granted.tokens
            self._changes.pop(state.slot, None)
        self._bounded.pop(state.number, None)
        state.granted, state.requested_in, state.unsettled = None, 0, 0
        state.drafted = state.accepted = 0

    def rebuild(self) -> None:
        granted = (state.granted for state in self._running.decoding.values())
        self.tokens = sum(draft.tokens for draft in granted if draft is not None)
        self.active = self._is_pending()

    def check(self, planned: int) -> None:
        """Assert that just the requests without a bucket are bounded, and that they have enough blocks."""
        decoding = self._running.decoding
        loose = {number for number, state in decoding.items() if state.bucket < 0}
        assert loose == set(self._bounded), "bounded requests and buckets disagree"
        granted = sum(one.granted.tokens for one in decoding.values() if one.granted is not None)
        assert self.tokens == granted, "granted tokens are miscounted"
        assert self.active or not self._is_pending(), "there are grants, and they are not active"
        for number, state in self._bounded.items():
            noted = [
                tokens for step in self._in_flight.values() for one, tokens in step if one == number
            ]
            assert state.unsettled == sum(noted), "drafts in flight are miscounted"
            reach = len(state.blocks) * self._limits.block_size
            certain = min(self._running.written(state, planned), state.length_max)
            assert certain <= reach, "a bounded request lacks blocks"
