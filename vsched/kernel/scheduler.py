"""The scheduler: events in, commands out.

`handle` applies one event to the two stages, then lets each group plan what it can. Requests are in the book; what
happens to the groups that serve them is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vsched.kernel.commands import (
    Command,
    Decide,
    Drained,
    EmitTokens,
    Notice,
    RestartGroup,
    SetTimer,
)
from vsched.kernel.encode.group import EncodeGroup
from vsched.kernel.encode.stage import EncodeStage
from vsched.kernel.events import (
    Aborted,
    Cleared,
    Drain,
    Encoded,
    EncodeFailed,
    Event,
    GroupLost,
    GroupReady,
    GroupRetired,
    Resume,
    Stepped,
    Submitted,
    TimerFired,
)
from vsched.kernel.explain import explain
from vsched.kernel.generate.group import GenerateGroup
from vsched.kernel.groups import Group, Status
from vsched.kernel.limits import KernelPolicies, SchedulerLimits
from vsched.kernel.policy_calls import PolicyFaults
from vsched.kernel.request import Phase
from vsched.kernel.request_table import RequestTable
from vsched.types import FinishReason, group_names


class Scheduler:
    """The state machine of all replicas; see `docs/architecture.md` for the whole picture.

    There is one line of items for all encode groups, and one line of requests for each generate group.
    """

    def __init__(self, limits: SchedulerLimits, policies: KernelPolicies) -> None:
        self.limits = limits
        self._faults = PolicyFaults()
        self.encode = EncodeStage(
            limits, policies.encode_admission, policies.embedding_eviction, self._faults
        )
        self.generators = [
            GenerateGroup(name, limits, policies, self.encode, self._faults)
            for name in group_names("generate", limits.generators)
        ]
        self._groups: dict[str, Group] = {
            group.name: group for group in (*self.encode.lanes, *self.generators)
        }
        # The generate group whose processes an encode group keeps from steps.
        shared = (
            zip(self.encode.lanes, self.generators, strict=True) if limits.encode_pauses else ()
        )
        self._hosts = {lane.name: stage for lane, stage in shared}
        self._draining: list[Group] = []
        self._book = RequestTable(limits, policies, self.encode, self.generators, self._faults)
        self._timer_ns: int | None = None

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Apply an event and return what to do about it, in order."""
        book = self._book
        book.now_ns = now_ns
        commands = book.commands = []
        match event:
            case Stepped():
                self._on_stepped(event)
            case Submitted():
                book.submit(event.request, event.stop_token_ids)
            case Encoded(step, group):
                book.items_ready(self.encode.finish(self._lane(group), step))
            case Aborted():
                self._on_aborted(event)
            case EncodeFailed(step, message, group):
                failed = self.encode.fail(self._lane(group), step)
                book.fail_all(failed, message, code="encode_failed")
            case GroupReady() | Resume():
                self._on_open(event.group)
            case GroupLost():
                self._on_group_lost(event)
            case GroupRetired():
                self._on_retired(event)
            case Drain():
                self._on_drain(event.group)
            case TimerFired():
                self._timer_ns = None
            case Cleared():
                book.clear(event.message, code=event.code)
        self._plan()
        return commands

    # --- results ---

    def _lane(self, group: str) -> EncodeGroup:
        lane = self._groups[group]
        assert isinstance(lane, EncodeGroup), f"{group} encodes nothing"
        return lane

    def _on_stepped(self, event: Stepped) -> None:
        stage = self._groups[event.group]
        assert isinstance(stage, GenerateGroup), f"{event.group} generates nothing"
        book = self._book
        settled = stage.finish_step(event, book.now_ns)
        book.commands.append(EmitTokens(event.step))
        for finished in event.finished:
            state = book.live.get(finished.number)
            if state is not None:  # else it was aborted while the step was out
                book.end(state, finished.reason)
        for state in settled:
            if state.number in book.live:
                book.come_back(state)

    def _on_aborted(self, event: Aborted) -> None:
        number = self._book.numbers.get(event.request_id)
        if number is not None:  # else it ended by itself meanwhile
            self._book.end(self._book.live[number], event.reason)

    # --- groups come and go ---

    def _on_open(self, name: str) -> None:
        """A group takes work: those who waited for it take their places, oldest first."""
        group, book = self._groups[name], self._book
        group.turn(Status.UP)
        if isinstance(group, EncodeGroup):
            self.encode.free_orphaned(group)
        for state in book.of(group, Phase.PARKED):
            book.stand_in_line(state)
        if isinstance(group, GenerateGroup):
            for stage in self.generators:
                if not stage.open:
                    book.move_waiting(stage)

    def _on_group_lost(self, event: GroupLost) -> None:
        group = self._groups[event.group]
        group.turn(Status.DOWN)
        self._book.commands.append(Notice(f"{event.group} was lost: {event.reason}"))
        if isinstance(group, EncodeGroup):
            message = (
                "an image could not be encoded: the encoder was lost twice while working on it"
            )
            failed = self.encode.lose(group, blame=not event.planned)
            self._book.fail_all(failed, message, code="encode_failed")
        elif isinstance(group, GenerateGroup):
            self._lose_generator(group, blame=not event.planned)
        self._book.commands.append(RestartGroup(event.group))

    def _lose_generator(self, stage: GenerateGroup, *, blame: bool) -> None:
        """What ran there waits for its return: whatever brought it down may be among it. Who waited goes elsewhere."""
        book = self._book
        lost, culprit = stage.lose(blame=blame)
        for state in book.of(stage):
            state.known = False
        if culprit is not None:
            message = "the request was running each time the server lost its generate group"
            book.end(culprit, FinishReason.ERROR, message=message, code="group_lost")
        for state in lost:
            if state is not culprit:
                book.drop_claims(state)
                book.stand_in_line(state)
        book.move_waiting(stage)

    def _on_retired(self, event: GroupRetired) -> None:
        """A lost group stays away: its requests go elsewhere, or end where no group of the stage is left."""
        group, book = self._groups[event.group], self._book
        assert not group.ready, "a group is lost before it is retired"
        group.turn(Status.RETIRED)
        if isinstance(group, EncodeGroup):
            self.encode.free_orphaned(group)
        book.commands.append(Notice(f"{event.group} is given up: {event.reason}"))
        stages: tuple[Sequence[Group], ...] = (self.encode.lanes, self.generators)
        if any(all(one.retired for one in groups) for groups in stages):
            book.given_up = event.reason
            book.clear(event.reason, code="given_up")
        elif isinstance(group, GenerateGroup):
            for state in book.of(group):
                book.move(state)

    def _on_drain(self, name: str) -> None:
        group = self._groups[name]
        if group.open:
            group.turn(Status.DRAINING)
            self._draining.append(group)
            if isinstance(group, GenerateGroup):
                self._book.move_waiting(group)

    def _announce_drained(self) -> None:
        for group in list(self._draining):
            if group.ready and (not group.idle or self._book.awaits(group)):
                continue
            self._draining.remove(group)
            if group.status is Status.DRAINING:
                self._book.commands.append(Drained(group.name))

    # --- planning ---

    def _plan(self) -> None:
        """Let every group plan until none has anything to send."""
        if self.limits.waiting_ns:
            self._book.expire()
        depth = self.limits.generate_depth
        while True:
            moved = more = False
            for stage in self.generators:
                if self._plan_generate(stage):
                    moved = True
                    more = more or stage.flight.out < depth
            if more or (self.encode.waiting and self._plan_encode()):
                continue
            if moved or not self._break_stall():
                break  # where something moved, something is out, and nobody can send more
        if self._draining:
            self._announce_drained()
        if self._faults.notices:
            self._book.commands += [Notice(text) for text in self._faults.notices]
            self._faults.notices.clear()
        self._set_timer()

    def _plan_generate(self, stage: GenerateGroup) -> bool:
        book = self._book
        decision = stage.plan(book.now_ns)
        if stage.fallen:
            fallen, stage.fallen = stage.fallen, []
            for state in fallen:
                book.come_back(state)
        if decision is None:
            return False
        book.commands.append(Decide(stage.name, decision))
        for chunk in decision.chunks:
            # While a chunk runs, the encoder works on the items of the next one.
            joined = stage.running.slots[chunk.slot]
            if joined is not None and joined.phase is Phase.PREFILL:
                book.claim(joined, joined.computed)
        return True

    def _plan_encode(self) -> bool:
        planned = self.encode.plan(self._book.now_ns, self._held_up)
        if planned is None:
            return False
        lane, batch = planned
        decision = lane.send(batch, stretch_ns=self._stretch_ns(lane))
        self._book.commands.append(Decide(lane.name, decision))
        return True

    def _stretch_ns(self, lane: EncodeGroup) -> int:
        """Return how long an encode group may work without a step of its processes in between; 0 for no limit."""
        host = self._hosts.get(lane.name)
        # Where none decodes yet, one may before the batch is done.
        return 0 if host is None else int(host.pace.left_ns(self._held_up(lane) or 1))

    def _held_up(self, lane: EncodeGroup) -> int:
        """Return how many requests get no token while an encode group is at work."""
        host = self._hosts.get(lane.name)
        return 0 if host is None else len(host.running.decoding)

    def _break_stall(self) -> bool:
        """When nothing is out, see that what keeps the oldest waiting still holds.

        A request may wait for an item behind a prefix that was evicted meanwhile, and could start
        with an earlier item now; or a younger one may hold what an older one needs. While a policy
        holds entries back, nothing is wrong yet.
        """
        if not self._at_rest() or self._holds():
            return False
        stages = [stage for stage in self.generators if stage.ready]
        waiting = [state for stage in stages for state in self._book.of(stage, Phase.ITEMS)]
        for state in waiting:
            self._book.stand_in_line(state)
        if any(state.phase is Phase.READY for state in waiting):
            return True
        return any(stage.favour_front() for stage in stages)

    def _at_rest(self) -> bool:
        """Return whether nothing is out anywhere, though an encoder and a generator could work."""
        for stage in self.generators:
            if stage.flight.out:
                return False
        if self.encode.in_flight:
            return False
        return self.encode.ready and any(stage.ready for stage in self.generators)

    def _holds(self) -> list[int]:
        """Return until when policies hold waiting entries back."""
        now_ns, holds = self._book.now_ns, []
        until_ns = self.encode.hold_until_ns
        if until_ns is not None and until_ns > now_ns:
            holds.append(until_ns)
        for stage in self.generators:
            until_ns = stage.line.hold_until_ns
            if until_ns is not None and until_ns > now_ns:
                holds.append(until_ns)
        return holds

    def _set_timer(self) -> None:
        due, expiry_ns = self._holds(), self._book.next_expiry_ns
        if expiry_ns is not None:
            due.append(expiry_ns)
        if due and (self._timer_ns is None or min(due) < self._timer_ns):
            self._timer_ns = min(due)
            self._book.commands.append(SetTimer(self._timer_ns))

    # --- questions ---

    def phase(self, request_id: str) -> Phase | None:
        """Return where a request is; None when it is not here."""
        number = self._book.numbers.get(request_id)
        return None if number is None else self._book.live[number].phase

    def explain(self, request_id: str) -> str:
        """Return where a request is and why, in words; empty when it is not here."""
        number = self._book.numbers.get(request_id)
        if number is None:
            return ""
        state = self._book.live[number]
        return explain(state, self.limits, self.encode, self._book.home(state))

    def statistics(self) -> dict[str, Any]:
        """Return counters and gauges of both stages, of every group, and of the request traffic."""
        book = self._book
        groups = {stage.name: stage.statistics() for stage in self.generators}
        generate: dict[str, Any] = {
            name: sum(one[name] for one in groups.values()) for name in next(iter(groups.values()))
        }
        generate["groups"] = {
            stage.name: {"state": stage.status.value, **groups[stage.name]}
            for stage in self.generators
        }
        return {
            "running": book.running,
            "waiting": book.waiting,
            "live_bytes": book.live_bytes,
            "finished": dict(book.finished),
            "refused": dict(book.refused),
            "policy_faults": dict(self._faults.counts),
            "encode": self.encode.statistics(),
            "generate": generate,
        }

    def check_invariants(self) -> None:
        """Assert that nothing is lost or owned twice, and that a scheduler at rest has nothing to do."""
        book = self._book
        self.encode.check(book.live)
        assert book.live_bytes == sum(state.host_bytes for state in book.live.values())
        due = self._holds()
        assert not due or self._timer_ns is not None, "entries are held, and no timer is set"
        at_rest = self._at_rest() and not self._holds() and not self.encode.orphaned
        for stage in self.generators:
            own = book.of(stage)
            stage.check(own)
            stuck = [state for state in own if stage.takes(state) or state.slot >= 0]
            if at_rest and stuck:
                why = [self.explain(state.request.request_id) for state in stuck]
                raise AssertionError(f"stuck in {stage.name}: {why}")
