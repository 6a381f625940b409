"""The moves that a request can make: every way from its arrival to its end.

It *claims* the items that its next chunk needs, is *enqueued* once that chunk could run, and *finishes* with exactly
one terminal command. Waiting, preemption, recovery and the move to another group come down to these three. Every move
returns the commands that it leads to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from vsched.kernel.admission_checks import refuse_full, refuse_impossible
from vsched.kernel.commands import Accept, Command, Finish, RefusalCode, Refuse, RequestTimes
from vsched.kernel.encode.embedding_cache import EmbeddingCache
from vsched.kernel.generate.chunks import drop_claims_before, reach
from vsched.kernel.generate.group import GenerateGroup
from vsched.kernel.limits import KernelPolicies, SchedulerLimits
from vsched.kernel.policy_calls import PolicyFaults, ask_encoding
from vsched.kernel.request import Phase, RequestState, host_bytes
from vsched.kernel.request_table import RequestTable
from vsched.kernel.routing import Router, RouterState
from vsched.policy import EncodingView, ItemSpan
from vsched.probes import probe
from vsched.types import FinishReason, Request


class RequestMovesState(msgspec.Struct):
    """The state of `RequestMoves`; `given_up` tells why no request can be served any more, empty while some can."""

    router: RouterState
    given_up: str


class RequestMoves:
    """Moves the requests of a table between the embedding cache and the generate groups."""

    def __init__(
        self,
        limits: SchedulerLimits,
        policies: KernelPolicies,
        table: RequestTable,
        cache: EmbeddingCache,
        groups: Sequence[GenerateGroup],
        faults: PolicyFaults,
    ) -> None:
        self._limits = limits
        self._encoding = policies.encoding
        self._table = table
        self._cache = cache
        self._groups = groups
        self._faults = faults
        self._router = Router(policies.routing, limits, faults)
        self._given_up = ""

    def group_of(self, state: RequestState) -> GenerateGroup:
        """Return the group that a request belongs to."""
        return self._groups[state.replica]

    def requests_of(self, group: GenerateGroup, *phases: Phase) -> list[RequestState]:
        """Return the requests of a group, those in some phases or all, oldest first."""
        return self._table.of_replica(self._groups.index(group), *phases)

    # --- arrivals ---

    def submit(
        self, request: Request, stop_token_ids: tuple[int, ...], now_ns: int
    ) -> list[Command]:
        """Accept a request and find it a place, or refuse it."""
        refusal = self._refuse(request)
        if refusal is not None:
            self._table.count_refusal(refusal.code)
            return [refusal]
        scope = self._encoding.scope
        state = self._table.add(request, stop_token_ids, now_ns, scope=scope)
        accepted = Accept(request.request_id, state.number)
        return [accepted, *self._route(state, now_ns, arriving=True)]

    def _refuse(self, request: Request) -> Refuse | None:
        if self._given_up:
            return Refuse(request.request_id, RefusalCode.GIVEN_UP, reason=self._given_up)
        refusal = refuse_impossible(request, self._limits, scope=self._encoding.scope)
        if refusal is None and self._table.find(request.request_id) is not None:
            refusal = Refuse(request.request_id, RefusalCode.DUPLICATE_ID)
        return refusal or self._refuse_full(request)

    def _refuse_full(self, request: Request) -> Refuse | None:
        table, limits = self._table, self._limits
        waiting = len(table.live) - sum(group.slots_held for group in self._groups)
        waiting_bytes = table.live_bytes + host_bytes(request)
        if waiting_bytes > limits.waiting_bytes:  # else it does not matter which of them run
            running = [state for group in self._groups for state in group.running]
            waiting_bytes -= sum(state.host_bytes for state in running)
        return refuse_full(request, waiting=waiting, waiting_bytes=waiting_bytes, limits=limits)

    def _route(
        self, state: RequestState, now_ns: int, *, arriving: bool = False
    ) -> Sequence[Command]:
        """Find a group for a request, and enqueue it there."""
        if self._limits.prefix_cache:
            state.extend_hashes(self._limits.block_size)
        group = self._router.choose(state, self._groups)
        state.replica = self._groups.index(group)
        group.add(state)
        return self.enqueue(state, now_ns, arriving=arriving)

    # --- snapshots ---

    def state(self) -> RequestMovesState:
        """Return the state."""
        return RequestMovesState(self._router.state(), self._given_up)

    def restore(self, state: RequestMovesState) -> None:
        """Take over a state."""
        self._router.restore(state.router)
        self._given_up = state.given_up

    # --- the way into the queue ---

    def enqueue(
        self, state: RequestState, now_ns: int, *, arriving: bool = False
    ) -> Sequence[Command]:
        """Claim the items of the next chunk; enqueue the request when it could run, else let it wait for them."""
        group = self.group_of(state)
        if not group.takes(state) and any(other.ready for other in self._groups):
            self._suspend(state)
            return ()
        computed = group.cached_tokens(state)
        state.uncached = len(state.tokens) - computed
        state.phase = Phase.ITEMS
        drop_claims_before(state, computed, cache=self._cache)
        ended = self.claim_items(state, computed, now_ns, arriving=arriving)
        if ended:
            return ended
        if group.can_start(state, computed):
            if not state.items_ready_ns:
                state.items_ready_ns = now_ns
            group.enqueue(state)
        return ()

    def claim_items(
        self, state: RequestState, start: int, now_ns: int, *, arriving: bool = False
    ) -> Sequence[Command]:
        """Claim the items that the chunk at `start` needs, and those that the policy adds.

        A request whose image has not the length that the cache knows ends over it: the terminal command is returned.
        """
        if not state.items or state.items[-1].end <= start:
            return ()
        view = EncodingView(
            items=[
                ItemSpan(item.offset, item.end, self._cache.is_ready(item.key))
                for item in state.items
            ],
            chunk_start=start,
            chunk_stop=reach(state, start, self._limits),
            chunk_tokens=self._limits.chunk_tokens,
            prompt_tokens=len(state.tokens),
            arriving=arriving,
        )
        for index in ask_encoding(self._encoding, view, self._faults):
            item = state.items[index]
            if index in state.wanted or item.end <= start:
                continue
            state.wanted.add(index)
            ready = self._cache.claim(state, index, now_ns)
            state.encoded_items += not ready
            if not self._cache.matches(item):
                message = "the image's token count differs from its cached embedding's"
                return [self.fail(state, now_ns, message, code="length_mismatch")]
        return ()

    def items_ready(self, numbers: Iterable[int], now_ns: int) -> list[Command]:
        """Items that these requests wait for are encoded."""
        commands: list[Command] = []
        for state in self._table.get_all(numbers):
            if state.phase is Phase.ITEMS:
                commands += self.enqueue(state, now_ns)
        return commands

    # --- to another group ---

    def requeue(self, state: RequestState, now_ns: int) -> list[Command]:
        """Enqueue a preempted request again: elsewhere where its group takes no more requests."""
        group = self.group_of(state)
        commands = list(self.enqueue(state, now_ns))
        if not group.open:
            probe("moves.requeued_from_closed_group")
            commands += self.move_waiting(group, now_ns)
        return commands

    def move_waiting(self, group: GenerateGroup, now_ns: int) -> list[Command]:
        """Let the requests that wait for a closed group go where they can run; without such a place, suspend them.

        Those that ran when it was lost stay: whatever brought it down may be among them. A draining group serves them.
        """
        elsewhere = any(other.open for other in self._groups)
        running = any(other.ready for other in self._groups)
        commands: list[Command] = []
        for state in self.requests_of(group, Phase.ITEMS, Phase.READY, Phase.SUSPENDED):
            if group.takes(state):
                probe("moves.kept_by_draining_group")
                continue
            if elsewhere and not state.losses:
                probe("moves.moved")
                commands += self.move(state, now_ns)
            elif running:
                probe("moves.suspended")
                self._suspend(state)
        return commands

    def move(self, state: RequestState, now_ns: int) -> Sequence[Command]:
        """Find another group for a request that holds no slot."""
        self.group_of(state).let_go(state)
        return self._route(state, now_ns)

    def _suspend(self, state: RequestState) -> None:
        """Let a request that holds no slot wait for its group to come back.

        It claims nothing: older than others, it would keep embeddings from those that can go on.
        """
        self.group_of(state).dequeue(state)
        self.drop_claims(state)
        state.phase = Phase.SUSPENDED

    # --- the end ---

    def finish(
        self,
        state: RequestState,
        reason: FinishReason,
        now_ns: int,
        *,
        message: str = "",
        code: str = "",
    ) -> Finish:
        """Free all that a request holds, and return its one terminal command."""
        self.group_of(state).remove(state)
        self.drop_claims(state)
        self._table.remove(state, reason)
        times = RequestTimes(
            submitted_ns=state.submitted_ns,
            items_ready_ns=state.items_ready_ns,
            admitted_ns=state.admitted_ns,
            first_token_ns=state.first_token_ns,
            finished_ns=now_ns,
            cached_tokens=state.cached_tokens,
            encoded_items=state.encoded_items,
            preemptions=state.preemptions,
        )
        return Finish(state.request.request_id, state.number, reason, times, message, code)

    def fail(self, state: RequestState, now_ns: int, message: str, *, code: str) -> Finish:
        """End a request with an error."""
        return self.finish(state, FinishReason.ERROR, now_ns, message=message, code=code)

    def fail_all(
        self, numbers: Iterable[int], now_ns: int, message: str, *, code: str
    ) -> list[Command]:
        """End requests with an error."""
        return [
            self.fail(state, now_ns, message, code=code) for state in self._table.get_all(numbers)
        ]

    def clear(self, now_ns: int, message: str, *, code: str) -> list[Command]:
        """End every request."""
        return [
            self.finish(state, FinishReason.ABORT, now_ns, message=message, code=code)
            for state in list(self._table.live.values())
        ]

    def give_up(self, reason: str, now_ns: int) -> list[Command]:
        """End every request, and refuse those to come: no group is left to serve them."""
        self._given_up = reason
        return self.clear(now_ns, reason, code="given_up")

    def expire(self, now_ns: int) -> list[Command]:
        """End the requests that have waited too long for their first step."""
        expired = self._table.take_expired(now_ns)
        if not expired:
            return []
        probe("moves.expired")
        waited_s = self._limits.waiting_ns / 1e9
        message = (
            f"the request waited for its first step for {waited_s:g} s, which is the limit "
            "(deadlines.waiting_s). Remedy: try again later, or raise the limit"
        )
        return [self.fail(state, now_ns, message, code="expired") for state in expired]

    def drop_claims(self, state: RequestState) -> None:
        """Let go of every item that a request claimed."""
        for index in sorted(state.wanted):
            state.wanted.discard(index)
            self._cache.release(state, index)
