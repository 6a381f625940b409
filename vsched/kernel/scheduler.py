"""The scheduler: events in, commands out.

`handle` applies one event to the two stages, then lets each plan what it can. All waiting, preempting and recovering
comes down to three moves: a request *claims* the items that its next chunk needs, *stands in line* once that chunk
could run, and *leaves* with exactly one terminal command.
"""

from __future__ import annotations

from collections.abc import Iterable

from vsched.kernel.commands import (
    Accept,
    Command,
    Decide,
    EmitTokens,
    Finish,
    Notice,
    Refuse,
    RequestTimes,
    RestartGroup,
    SetTimer,
)
from vsched.kernel.encode import EncodeStage
from vsched.kernel.events import (
    Aborted,
    Cleared,
    Encoded,
    EncodeFailed,
    Event,
    GroupLost,
    GroupReady,
    Stepped,
    Submitted,
    Timer,
)
from vsched.kernel.generate import GenerateStage
from vsched.kernel.guard import PolicyFaults, ask_encoding
from vsched.kernel.refusals import (
    refuse_duplicate,
    refuse_full_bytes,
    refuse_full_count,
    refuse_impossible,
)
from vsched.kernel.request import Phase, RequestState, host_bytes
from vsched.kernel.sizes import KernelPolicies, Sizes
from vsched.policy import EncodingView, ItemSpan
from vsched.types import FinishReason, Request

LOSSES_MAX = 2
"""A request in flight in so many group losses is taken for their cause and ended."""


class Scheduler:
    """One replica's state machine; see `docs/architecture.md` for the whole picture."""

    def __init__(self, sizes: Sizes, policies: KernelPolicies) -> None:
        self.sizes = sizes
        self._policies = policies
        self._faults = PolicyFaults()
        self.encode = EncodeStage(
            sizes, policies.encode_admission, policies.embedding_eviction, self._faults
        )
        self.generate = GenerateStage(sizes, policies, self.encode, self._faults)
        self._requests: dict[int, RequestState] = {}
        self._numbers: dict[str, int] = {}
        self._arrivals = 0
        self._live_bytes = 0
        self._now_ns = 0
        self._timer_ns: int | None = None
        self._commands: list[Command] = []
        self.finished: dict[str, int] = {reason.value: 0 for reason in FinishReason}
        self.refused: dict[str, int] = {}

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Apply an event and return what to do about it, in order."""
        self._now_ns = now_ns
        self._commands = []
        match event:
            case Stepped():
                self._on_stepped(event)
            case Submitted():
                self._on_submitted(event.request, event.stop_token_ids)
            case Encoded():
                self._on_items_ready(self.encode.finish(event.step))
            case Aborted():
                self._on_aborted(event)
            case EncodeFailed():
                self._fail_all(self.encode.fail(event.step), event.message, code="encode_failed")
            case GroupReady():
                self._stage(event.group).ready = True
            case GroupLost():
                self._on_group_lost(event)
            case Timer():
                self._timer_ns = None
            case Cleared():
                self._on_cleared(event)
        self._plan()
        return self._commands

    def _stage(self, group: str) -> EncodeStage | GenerateStage:
        assert group in ("encode", "generate"), f"no group is called {group!r}"
        return self.encode if group == "encode" else self.generate

    # --- arrivals ---

    def _on_submitted(self, request: Request, stop_token_ids: tuple[int, ...]) -> None:
        refusal = refuse_impossible(request, self.sizes, scope=self._policies.encoding.scope)
        if refusal is None and request.request_id in self._numbers:
            refusal = refuse_duplicate(request)
        if refusal is None:
            refusal = self._refuse_full(request)
        if refusal is not None:
            self.refused[refusal.code] = self.refused.get(refusal.code, 0) + 1
            self._commands.append(refusal)
            return
        self._arrivals += 1
        scope = self._policies.encoding.scope
        state = RequestState(request, self._arrivals, stop_token_ids, self._now_ns, scope=scope)
        self._live_bytes += state.host_bytes
        self._requests[state.number] = state
        self._numbers[request.request_id] = state.number
        self._commands.append(Accept(request.request_id, state.number))
        self.generate.hash_tokens(state)
        self._stand_in_line(state, arriving=True)

    def _refuse_full(self, request: Request) -> Refuse | None:
        """Return the refusal when too many requests wait already, or too many bytes (G12)."""
        running = self.generate.running
        waiting = len(self._requests) - len(running)
        if waiting >= self.sizes.waiting:
            return refuse_full_count(request, waiting, self.sizes)
        limit = self.sizes.waiting_bytes
        size = host_bytes(request)
        if self._live_bytes + size > limit:
            waiting_bytes = self._live_bytes - sum(one.host_bytes for one in running.in_order())
            if waiting and waiting_bytes + size > limit:
                return refuse_full_bytes(request, waiting_bytes + size, self.sizes)
        return None

    # --- the way into the line ---

    def _stand_in_line(self, state: RequestState, *, arriving: bool = False) -> None:
        """Claim the items of the next chunk; stand in line when it could run, else wait for them."""
        computed = len(self.generate.cached_prefix(state)) * self.sizes.block_size
        state.uncached = len(state.tokens) - computed
        state.phase = Phase.ITEMS
        self.generate.drop_claims_before(state, computed)
        if not self._claim(state, computed, arriving=arriving):
            return
        if self.generate.chunk_stop(state, computed, self.sizes.batch_tokens) > computed:
            if not state.items_ready_ns:
                state.items_ready_ns = self._now_ns
            self.generate.enqueue(state)

    def _claim(self, state: RequestState, start: int, *, arriving: bool = False) -> bool:
        """Ask the encode stage for the items that the chunk at `start` needs, and those the policy adds."""
        if not state.items or state.items[-1].end <= start:
            return True
        stop = min(len(state.tokens), start + self.sizes.chunk_tokens)
        view = EncodingView(
            items=[
                ItemSpan(item.offset, item.end, self.encode.is_ready(item.key))
                for item in state.items
            ],
            chunk_start=start,
            chunk_stop=stop,
            chunk_tokens=self.sizes.chunk_tokens,
            prompt_tokens=len(state.tokens),
            arriving=arriving,
        )
        for index in ask_encoding(self._policies.encoding, view, self._faults):
            item = state.items[index]
            if index in state.wanted or item.end <= start:
                continue
            state.wanted.add(index)
            ready = self.encode.want(state, index, self._now_ns)
            state.encoded_items += not ready
            if not self.encode.matches(item):
                message = "the image's token count differs from its cached embedding's"
                self._end(state, FinishReason.ERROR, message=message, code="length_mismatch")
                return False
        return True

    def _on_items_ready(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            state = self._requests[number]
            if state.phase is Phase.ITEMS:
                self._stand_in_line(state)

    # --- results ---

    def _on_stepped(self, event: Stepped) -> None:
        settled = self.generate.finish_step(event, self._now_ns)
        self._commands.append(EmitTokens(event.step))
        for finished in event.finished:
            state = self._requests.get(finished.number)
            if state is not None:  # else it was aborted while the step was out
                self._end(state, finished.reason)
        for state in settled:
            if state.number in self._requests:
                self._stand_in_line(state)

    def _on_aborted(self, event: Aborted) -> None:
        number = self._numbers.get(event.request_id)
        if number is not None:  # else it ended by itself meanwhile
            self._end(self._requests[number], event.reason)

    def _on_cleared(self, event: Cleared) -> None:
        for state in list(self._requests.values()):
            self._end(state, FinishReason.ABORT, message=event.message, code=event.code)

    def _fail_all(self, numbers: Iterable[int], message: str, *, code: str) -> None:
        for number in numbers:
            state = self._requests[number]
            self._end(state, FinishReason.ERROR, message=message, code=code)

    def _end(
        self, state: RequestState, reason: FinishReason, *, message: str = "", code: str = ""
    ) -> None:
        """Free all that a request holds and send its one terminal command."""
        if state.phase is Phase.READY:
            self.generate.dequeue(state)
        self.generate.retire(state)
        self._drop_claims(state)
        self._live_bytes -= state.host_bytes
        del self._requests[state.number]
        del self._numbers[state.request.request_id]
        self.finished[reason.value] += 1
        times = RequestTimes(
            submitted_ns=state.submitted_ns,
            items_ready_ns=state.items_ready_ns,
            admitted_ns=state.admitted_ns,
            first_token_ns=state.first_token_ns,
            finished_ns=self._now_ns,
            cached_tokens=state.cached_tokens,
            encoded_items=state.encoded_items,
            preemptions=state.preemptions,
        )
        self._commands.append(
            Finish(state.request.request_id, state.number, reason, times, message, code)
        )

    def _drop_claims(self, state: RequestState) -> None:
        for index in sorted(state.wanted):
            state.wanted.discard(index)
            self.encode.consume(state, index)

    # --- loss and recovery ---

    def _on_group_lost(self, event: GroupLost) -> None:
        self._commands.append(Notice(f"the {event.group} group was lost: {event.reason}"))
        if event.group == "encode":
            message = (
                "an image could not be encoded: the encoder was lost twice while working on it"
            )
            self._fail_all(self.encode.lose(), message, code="encode_failed")
        else:
            lost = self.generate.lose()
            for state in self._requests.values():
                state.known = False
            for state in lost:
                if state.losses >= LOSSES_MAX:
                    message = "the request was running each time the server lost its generate group"
                    self._end(state, FinishReason.ERROR, message=message, code="group_lost")
                else:
                    self._drop_claims(state)
                    self._stand_in_line(state)
        self._commands.append(RestartGroup(event.group))

    # --- planning ---

    def _plan(self) -> None:
        """Let both stages plan until neither has anything to send."""
        while True:
            sent = self._plan_generate() or self._plan_encode()
            if not sent and not self.generate.fallen and not self._break_stall():
                break
        if self._faults.notices:
            self._commands += [Notice(text) for text in self._faults.notices]
            self._faults.notices.clear()
        self._set_timer()

    def _plan_generate(self) -> bool:
        decision = self.generate.plan(self._now_ns)
        fallen, self.generate.fallen = self.generate.fallen, []
        for state in fallen:
            self._stand_in_line(state)
        if decision is None:
            return False
        self._commands.append(Decide("generate", decision))
        for chunk in decision.chunks:
            self._claim_next(chunk.slot)
        return True

    def _plan_encode(self) -> bool:
        decision = self.encode.plan(self._now_ns)
        if decision is not None:
            self._commands.append(Decide("encode", decision))
        return decision is not None

    def _break_stall(self) -> bool:
        """When nothing is out, see that what keeps the oldest waiting still holds.

        A request may wait for an item behind a prefix that was evicted meanwhile, and could start
        with an earlier item now; or a younger one may hold what an older one needs. While a policy
        holds entries back, nothing is wrong yet.
        """
        if not self._at_rest() or self._holds():
            return False
        waiting = [state for state in self._requests.values() if state.phase is Phase.ITEMS]
        for state in waiting:
            self._stand_in_line(state)
        if any(state.phase is Phase.READY for state in waiting):
            return True
        return self.generate.favour_front()

    def _at_rest(self) -> bool:
        """Return whether both groups could work and nothing is out."""
        out = self.generate.flight.out or self.encode.in_flight
        return not out and self.generate.ready and self.encode.ready

    def _holds(self) -> list[int]:
        """Return until when policies hold waiting entries back."""
        return [
            stage.hold_until_ns
            for stage in (self.encode, self.generate)
            if stage.hold_until_ns is not None and stage.hold_until_ns > self._now_ns
        ]

    def _claim_next(self, slot: int) -> None:
        """While a chunk runs, the encoder works on the items of the next one."""
        state = self.generate.running.slots[slot]
        if state is not None and state.phase is Phase.PREFILL:
            self._claim(state, state.computed)

    def _set_timer(self) -> None:
        holds = self._holds()
        if holds and (self._timer_ns is None or min(holds) < self._timer_ns):
            self._timer_ns = min(holds)
            self._commands.append(SetTimer(self._timer_ns))

    # --- questions ---

    def explain(self, request_id: str) -> str:
        """Return where a request is and why, in words; empty when it is not here."""
        number = self._numbers.get(request_id)
        if number is None:
            return ""
        state = self._requests[number]
        match state.phase:
            case Phase.ITEMS:
                missing = [
                    index
                    for index in sorted(state.wanted)
                    if not self.encode.is_ready(state.items[index].key)
                ]
                return f"{state.phase}: items {missing} of {len(state.items)} are not encoded yet"
            case Phase.READY:
                need = self.sizes.blocks_for(len(state.tokens))
                return f"{state.phase}: needs {need} KV blocks, {self.generate.pool.available} available"
            case Phase.PREFILL:
                return f"{state.phase}: {state.computed} of {len(state.tokens)} tokens in slot {state.slot}"
            case Phase.DECODE:
                outputs = max(0, self.generate.flight.done - state.first_step + 1)
                return f"{state.phase}: {outputs} tokens since it joined slot {state.slot}"
            case Phase.SETTLING:
                return str(state.phase)

    def statistics(self) -> dict[str, object]:
        """Return counters and gauges of both stages and of the request traffic."""
        return {
            "running": len(self.generate.running),
            "waiting": len(self._requests) - len(self.generate.running),
            "live_bytes": self._live_bytes,
            "finished": dict(self.finished),
            "refused": dict(self.refused),
            "policy_faults": dict(self._faults.counts),
            "encode": self.encode.statistics(),
            "generate": self.generate.statistics(),
        }

    def check_invariants(self) -> None:
        """Assert that nothing is lost or owned twice, and that a scheduler at rest has nothing to do."""
        self.encode.check(self._requests)
        self.generate.check()
        assert self._live_bytes == sum(state.host_bytes for state in self._requests.values())
        for state in self._requests.values():
            if state.phase is Phase.READY:
                assert self.generate.stands_in_line(state), "a ready request is not in line"
        holds = self._holds()
        assert not holds or self._timer_ns is not None, "entries are held, and no timer is set"
        if self._at_rest() and not holds:
            assert not self._requests, f"stuck: {[self.explain(name) for name in self._numbers]}"
