"""Every live request, and the moves that it can make.

It *claims* the items that its next chunk needs, *stands in line* once that chunk could run, and *leaves* with exactly
one terminal command. Waiting, preempting, recovering and moving to another group come down to these three.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from vsched.kernel.admission_checks import (
    refuse_duplicate,
    refuse_full_bytes,
    refuse_full_count,
    refuse_impossible,
    refuse_unserved,
)
from vsched.kernel.commands import Accept, Command, Finish, Refuse, RequestTimes
from vsched.kernel.encode.stage import EncodeStage
from vsched.kernel.generate.chunks import drop_claims_before
from vsched.kernel.generate.group import GenerateGroup
from vsched.kernel.groups import Group
from vsched.kernel.limits import KernelPolicies, SchedulerLimits
from vsched.kernel.policy_calls import PolicyFaults, ask_encoding
from vsched.kernel.request import Phase, RequestState, host_bytes
from vsched.kernel.routing import Router
from vsched.policy import EncodingView, ItemSpan
from vsched.types import FinishReason, Request


class RequestTable:
    """The live requests of a scheduler.

    Attributes:
        commands: What has been decided in the event at hand; the scheduler hands it out.
        now_ns: The time of that event.
        given_up: Why nobody can be served any more; empty while somebody can.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        policies: KernelPolicies,
        encode: EncodeStage,
        generators: list[GenerateGroup],
        faults: PolicyFaults,
    ) -> None:
        self.commands: list[Command] = []
        self.now_ns = 0
        self.given_up = ""
        self.live: dict[int, RequestState] = {}
        self.numbers: dict[str, int] = {}
        self.live_bytes = 0
        self.finished: dict[str, int] = {reason.value: 0 for reason in FinishReason}
        self.refused: dict[str, int] = {}
        self._limits = limits
        self._encoding = policies.encoding
        self._encode = encode
        self._generators = generators
        self._faults = faults
        self._router = Router(policies.routing, limits, faults)
        self._arrivals = 0
        self._expiries: deque[tuple[int, int]] = deque()

    # --- arrivals ---

    def submit(self, request: Request, stop_token_ids: tuple[int, ...]) -> None:
        """Accept a request and find it a place, or refuse it."""
        refusal = self._refuse(request)
        if refusal is not None:
            self.refused[refusal.code] = self.refused.get(refusal.code, 0) + 1
            self.commands.append(refusal)
            return
        self._arrivals += 1
        scope = self._encoding.scope
        state = RequestState(request, self._arrivals, stop_token_ids, self.now_ns, scope=scope)
        self.live_bytes += state.host_bytes
        self.live[state.number] = state
        self.numbers[request.request_id] = state.number
        self.commands.append(Accept(request.request_id, state.number))
        if self._limits.waiting_ns:
            self._expiries.append((self.now_ns + self._limits.waiting_ns, state.number))
        self._settle_in(state, arriving=True)

    def _refuse(self, request: Request) -> Refuse | None:
        if self.given_up:
            return refuse_unserved(request, self.given_up)
        refusal = refuse_impossible(request, self._limits, scope=self._encoding.scope)
        if refusal is None and request.request_id in self.numbers:
            refusal = refuse_duplicate(request)
        return refusal or self._refuse_full(request)

    def _refuse_full(self, request: Request) -> Refuse | None:
        """Return the refusal when too many requests wait already, or too many bytes (G12)."""
        waiting = self.waiting
        if waiting >= self._limits.waiting:
            return refuse_full_count(request, waiting, self._limits)
        limit = self._limits.waiting_bytes
        size = host_bytes(request)
        if self.live_bytes + size > limit:
            running = [one for stage in self._generators for one in stage.running.in_order()]
            waiting_bytes = self.live_bytes - sum(one.host_bytes for one in running)
            if waiting and waiting_bytes + size > limit:
                return refuse_full_bytes(request, waiting_bytes + size, self._limits)
        return None

    # --- the way into the line ---

    def home(self, state: RequestState) -> GenerateGroup:
        """Return the group that a request belongs to."""
        return self._generators[state.home]

    def of(self, group: Group, *phases: Phase) -> list[RequestState]:
        """Return the requests of a group, those in some phases or all, oldest first."""
        return [
            state
            for state in self.live.values()
            if self.home(state) is group and (not phases or state.phase in phases)
        ]

    def _settle_in(self, state: RequestState, *, arriving: bool = False) -> None:
        """Find a group for a request, and let it stand in line there."""
        if self._limits.prefix_cache:
            state.extend_hashes(self._limits.block_size)
        stage = self._router.choose(state, self._generators)
        state.home = self._generators.index(stage)
        stage.load.add(state)
        self.stand_in_line(state, arriving=arriving)

    def stand_in_line(self, state: RequestState, *, arriving: bool = False) -> None:
        """Claim the items of the next chunk; stand in line when it could run, else wait for them."""
        stage = self.home(state)
        if not stage.takes(state) and any(other.ready for other in self._generators):
            # It claims nothing: older than others, it would keep embeddings from those that can go on.
            state.phase = Phase.PARKED
            return
        computed = len(stage.cached_prefix(state)) * self._limits.block_size
        state.uncached = len(state.tokens) - computed
        state.phase = Phase.ITEMS
        drop_claims_before(state, computed, encode=self._encode)
        if not self.claim(state, computed, arriving=arriving):
            return
        if stage.chunk_stop(state, computed, self._limits.batch_tokens) > computed:
            if not state.items_ready_ns:
                state.items_ready_ns = self.now_ns
            stage.line.put(state)

    def claim(self, state: RequestState, start: int, *, arriving: bool = False) -> bool:
        """Ask the encode stage for the items that the chunk at `start` needs, and those the policy adds.

        Returns False when the request ended over it.
        """
        if not state.items or state.items[-1].end <= start:
            return True
        stop = min(len(state.tokens), start + self._limits.chunk_tokens)
        view = EncodingView(
            items=[
                ItemSpan(item.offset, item.end, self._encode.is_ready(item.key))
                for item in state.items
            ],
            chunk_start=start,
            chunk_stop=stop,
            chunk_tokens=self._limits.chunk_tokens,
            prompt_tokens=len(state.tokens),
            arriving=arriving,
        )
        for index in ask_encoding(self._encoding, view, self._faults):
            item = state.items[index]
            if index in state.wanted or item.end <= start:
                continue
            state.wanted.add(index)
            ready = self._encode.want(state, index, self.now_ns)
            state.encoded_items += not ready
            if not self._encode.matches(item):
                message = "the image's token count differs from its cached embedding's"
                self.end(state, FinishReason.ERROR, message=message, code="length_mismatch")
                return False
        return True

    def items_ready(self, numbers: Iterable[int]) -> None:
        """Items that these requests wait for are encoded."""
        for number in numbers:
            state = self.live[number]
            if state.phase is Phase.ITEMS:
                self.stand_in_line(state)

    def awaits(self, group: Group) -> bool:
        """Return whether a request waits for its turn in a group, and will get it."""
        return bool(self.of(group, Phase.ITEMS, Phase.READY))

    # --- to another group ---

    def come_back(self, state: RequestState) -> None:
        """Let a preempted request stand in line again: elsewhere where its group takes nobody."""
        stage = self.home(state)
        self.stand_in_line(state)
        if not stage.open:
            self.move_waiting(stage)

    def move_waiting(self, stage: GenerateGroup) -> None:
        """Let the requests that wait for a closed group go where they can run; without such a place, they are parked.

        Those that ran when it was lost stay: whatever brought it down may be among them. A draining group serves them.
        """
        elsewhere = any(other.open for other in self._generators)
        running = any(other.ready for other in self._generators)
        for state in self.of(stage, Phase.ITEMS, Phase.READY, Phase.PARKED):
            if stage.takes(state):
                continue
            if elsewhere and not state.losses:
                self.move(state)
            elif running and state.phase is not Phase.PARKED:
                self._park(state)

    def move(self, state: RequestState) -> None:
        """Find another group for a request that holds no slot."""
        self.home(state).let_go(state)
        self.drop_claims(state)
        self._settle_in(state)

    def _park(self, state: RequestState) -> None:
        """Let a request that holds no slot wait for its group to come back."""
        if state.phase is Phase.READY:
            self.home(state).line.remove(state)
        self.drop_claims(state)
        state.phase = Phase.PARKED

    # --- the way out ---

    def fail_all(self, numbers: Iterable[int], message: str, *, code: str) -> None:
        """End requests with an error."""
        for number in numbers:
            self.end(self.live[number], FinishReason.ERROR, message=message, code=code)

    def clear(self, message: str, *, code: str) -> None:
        """End every request."""
        for state in list(self.live.values()):
            self.end(state, FinishReason.ABORT, message=message, code=code)

    def expire(self) -> None:
        """End those that have waited too long for their first step; by number, wherever they stand (E17)."""
        while self._expiries and self._expiries[0][0] <= self.now_ns:
            state = self.live.get(self._expiries.popleft()[1])
            if state is not None and not state.admitted_ns:
                waited_s = self._limits.waiting_ns / 1e9
                message = (
                    f"the request waited for its first step for {waited_s:g} s, which is the limit "
                    "(deadlines.waiting_s). Remedy: try again later, or raise the limit"
                )
                self.end(state, FinishReason.ERROR, message=message, code="expired")

    @property
    def next_expiry_ns(self) -> int | None:
        """When `expire` must be called next; None when nothing is due."""
        return self._expiries[0][0] if self._expiries else None

    def end(
        self, state: RequestState, reason: FinishReason, *, message: str = "", code: str = ""
    ) -> None:
        """Free all that a request holds and send its one terminal command."""
        stage = self.home(state)
        if state.phase is Phase.READY:
            stage.line.remove(state)
        stage.retire(state)
        self.drop_claims(state)
        self.live_bytes -= state.host_bytes
        del self.live[state.number]
        del self.numbers[state.request.request_id]
        self.finished[reason.value] += 1
        times = RequestTimes(
            submitted_ns=state.submitted_ns,
            items_ready_ns=state.items_ready_ns,
            admitted_ns=state.admitted_ns,
            first_token_ns=state.first_token_ns,
            finished_ns=self.now_ns,
            cached_tokens=state.cached_tokens,
            encoded_items=state.encoded_items,
            preemptions=state.preemptions,
        )
        self.commands.append(
            Finish(state.request.request_id, state.number, reason, times, message, code)
        )

    def drop_claims(self, state: RequestState) -> None:
        """Let go of every item that a request asked for."""
        for index in sorted(state.wanted):
            state.wanted.discard(index)
            self._encode.consume(state, index)

    # --- views ---

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return sum(len(stage.running) for stage in self._generators)

    @property
    def waiting(self) -> int:
        """Requests that hold none."""
        return len(self.live) - self.running
