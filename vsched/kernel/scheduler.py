"""The scheduler: events in, commands out.

`handle` applies an event, then plans the next steps of all groups. This module connects `RequestMoves` (the life of a
request), `GenerateGroup` and `EncodeStage`. Their methods return commands, which are sent in the order in which they
are returned.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from itertools import islice
from operator import attrgetter
from traceback import TracebackException
from typing import Any

import msgspec

from vsched.kernel.arrivals import ArrivalGate
from vsched.kernel.commands import (
    Command,
    Decide,
    Drained,
    EmitTokens,
    Notice,
    RestartGroup,
    SetTimer,
)
from vsched.kernel.encode.embedding_cache import EmbeddingCache, EntryPhase
from vsched.kernel.encode.stage import EncodeGroup, EncodeStage
from vsched.kernel.events import (
    Aborted,
    Arrived,
    Cleared,
    Drain,
    Encoded,
    EncodeFailed,
    Event,
    GroupLost,
    GroupReady,
    GroupRetired,
    PolicyReplaced,
    Resume,
    Stepped,
    Submitted,
    TimerFired,
    Withdrawn,
)
from vsched.kernel.generate.group import GenerateGroup
from vsched.kernel.generate.measures import MeasuredGroups
from vsched.kernel.generate.steps import NOTHING_PLANNED, PlanResult
from vsched.kernel.groups import DirtyGroups, Group, Status
from vsched.kernel.limits import SchedulerLimits
from vsched.kernel.live import RequestRow, live_request
from vsched.kernel.request import ITEMS, PROMPT, READY, SUSPENDED, Phase, RequestState, RequestTable
from vsched.kernel.request_moves import Loads, RequestMoves
from vsched.policy import POLICY_TABLES, SEVERAL, seats_in, without_seats
from vsched.policy_host.seats import Ask, PolicyMemory, PolicySeats, SeatPolicies
from vsched.policy_host.snapshot import Restorable, Saved, SavedKeys, SnapshotRoot
from vsched.policy_host.waiting import Holds, OrderedQueue
from vsched.probes import probe
from vsched.types import FinishReason, group_names

PolicyTable = dict[str, Any]
"""A configuration table of a policy: `use` and its fields."""
GRAMMAR_FAILED = (
    "the output could not be constrained any further, because its grammar became too complex. "
    "Remedy: simplify the grammar; fewer alternatives that begin alike help most."
)
NOT_FINITE = (
    "no token could be drawn, as no logit of the model was a finite number. Remedy: where activations overflow "
    "float16, serve with model.dtype bfloat16 or float32; otherwise check the weights of the model and of its adapter."
)


class InstalledPolicies(Restorable):
    """The configuration tables of the policies that replaced others, in order.

    They are restored first, since other saved state is theirs.
    """

    def __init__(self, install: Callable[[Mapping[str, PolicyTable]], None]) -> None:
        self._tables: list[tuple[str, PolicyTable]] = []
        self._install = install

    def install(self, tables: Mapping[str, PolicyTable]) -> None:
        """Put the policies of these tables at their seats.

        Raises:
            ConfigError, PolicyError: If one cannot be built; nothing is changed.
        """
        self._install(tables)
        kept: list[tuple[str, PolicyTable]] = []
        later: set[str] = set()
        for path, table in reversed([*self._tables, *tables.items()]):
            if seats := {*seats_in(path, table)} - later:  # else it decides nowhere any more
                kept.append((path, table))
                later |= seats
        self._tables = kept[::-1]

    @property
    def by_seat(self) -> dict[str, PolicyTable]:
        """The installed table by each policy table that it decides for."""
        return {seat: table for path, table in self._tables for seat in seats_in(path, table)}

    @property
    def packed(self) -> Saved[bytes]:
        """The tables as bytes."""
        return msgspec.msgpack.encode(self._tables)

    @packed.setter
    def packed(self, data: Saved[bytes]) -> None:
        tables = msgspec.msgpack.decode(data)
        for path, table in tables.items() if isinstance(tables, dict) else tables:
            self.install({path: table})


class Scheduler(SnapshotRoot):
    """The state machine of all replicas; see `docs/architecture.md`.

    There is one queue of items for all encode groups, and one queue of requests for each generate group.
    """

    _installed: Saved[InstalledPolicies]
    embeddings: Saved[EmbeddingCache]
    encode: Saved[EncodeStage]
    _table: Saved[RequestTable]
    _groups: Saved[dict[str, Group]]
    _moves: Saved[RequestMoves]
    _gate: Saved[ArrivalGate]
    _seats: Saved[PolicySeats]
    _draining: SavedKeys[dict[str, Group]]
    _timer_ns: Saved[int | None] = None
    _now_ns: Saved[int] = 0

    def __init__(self, limits: SchedulerLimits, policies: SeatPolicies) -> None:
        self.limits = limits
        self._build = policies.build
        self._installed = InstalledPolicies(self._install_policies)
        self._seats = seats = PolicySeats(policies)
        self._faults = seats.faults
        self._table = RequestTable(limits.waiting_ns)
        self.embeddings = EmbeddingCache(limits, seats)
        self.encode = EncodeStage(limits, seats, self.embeddings, self._table.live)
        self._dirty = dirty = DirtyGroups(limits.generators)
        self.generators = [
            GenerateGroup(name, index, limits, self.embeddings, self._table.live, seats, dirty)
            for index, name in enumerate(group_names("generate", limits.generators))
        ]
        self._loads = loads = Loads(self.generators, dirty)
        encodes, cache = self.encode.encodes, self.embeddings
        measured = MeasuredGroups(tuple(self.generators), encodes, cache)
        self.encode.measured = self.embeddings.measured = measured
        for group in self.generators:
            group.measured = MeasuredGroups((group,), encodes, cache)
        self._moves = RequestMoves(
            limits, self._table, self.embeddings, self.generators, seats, measured, loads
        )
        self._gate = ArrivalGate(
            seats.add_seat("arrival"),
            limits,
            self._table,
            self.generators,
            measured,
            loads,
        )
        self._groups = {group.name: group for group in (*self.encode.groups, *self.generators)}
        # The generate group that each encode group's batches delay, as they share processes.
        if limits.encode_pauses:
            pairs = zip(self.encode.groups, self.generators, strict=True)
            self.encode.hosts = {encoder.name: generator for encoder, generator in pairs}
        self._queues: tuple[OrderedQueue[Any], ...] = (
            *(group.queue for group in self.generators),
            self.embeddings.queue,
        )
        self._holds = Holds(self._queues)
        self._draining = {}

    def handle(self, event: Event, now_ns: int) -> list[Command]:
        """Apply an event, and return the commands that follow, in order."""
        self._now_ns = now_ns
        commands: list[Command]
        match event:
            case Stepped():
                commands = self._on_stepped(event, now_ns)
            case Submitted():
                self._gate.leave(event.arrival_id)
                commands = self._moves.submit(event, now_ns)
            case Arrived() | Withdrawn():
                commands = self._gate.handle_arrival(event, now_ns)
            case Encoded() | EncodeFailed():
                commands = self._on_encoded(event, now_ns)
            case Aborted():
                commands = self._on_aborted(event, now_ns)
            case GroupReady() | Resume():
                commands = self._on_open(event, now_ns)
            case GroupLost():
                commands = self._on_group_lost(event, now_ns)
            case GroupRetired():
                commands = self._on_retired(event, now_ns)
            case Drain():
                commands = self._on_drain(event.group, now_ns)
            case TimerFired():
                self._timer_ns = None
                commands = self._gate.ask_again(now_ns)
            case Cleared() | PolicyReplaced():
                commands = self._on_operator(event, now_ns)
        self._plan(commands, now_ns)
        return commands

    # --- results ---

    def _on_encoded(self, event: Encoded | EncodeFailed, now_ns: int) -> list[Command]:
        group = self._groups[event.group]
        assert isinstance(group, EncodeGroup), f"{event.group} encodes nothing"
        if isinstance(event, Encoded):
            return self._moves.items_ready(
                self.encode.complete_batch(group, event.step, now_ns), now_ns
            )
        numbers, message = self.encode.fail_batch(group, event.step), event.failure.message
        return self._moves.fail_all(numbers, now_ns, message, code="encode_failed")

    def _on_stepped(self, event: Stepped, now_ns: int) -> list[Command]:
        group = self._groups[event.group]
        assert isinstance(group, GenerateGroup), f"{event.group} generates nothing"
        requeued = group.complete_step(event, now_ns)
        commands: list[Command] = [EmitTokens(event.step)]
        live, moves = self._table.live, self._moves
        for finished in event.finished:
            state = live.get(finished.number)
            if state is not None and finished.reason is FinishReason.ERROR:
                message, code = GRAMMAR_FAILED, "grammar_failed"
                if not state.request.sampling.grammar:
                    message, code = NOT_FINITE, "no_token"
                commands.append(moves.fail_request(state, now_ns, message, code=code))
            elif state is not None:
                commands.append(moves.finish_request(state, finished.reason, now_ns))
            else:
                probe("kernel.finished_after_abort")
        for state in requeued:
            if state.number in live:
                commands += self._moves.requeue(state, now_ns)
            else:
                probe("kernel.settled_at_its_end")
        return commands

    def _on_aborted(self, event: Aborted, now_ns: int) -> list[Command]:
        state = self._table.find(event.request_id)
        if state is None:
            return []  # already ended
        if state.is_suspect:
            probe("kernel.suspect_aborted")
        return [self._moves.finish_request(state, event.reason, now_ns)]

    def _on_operator(self, event: Cleared | PolicyReplaced, now_ns: int) -> list[Command]:
        if isinstance(event, Cleared):
            if not all(group.ready for group in self._groups.values()):
                probe("kernel.clear_during_recovery")
            return self._moves.clear(now_ns, event.message, code=event.code)
        if event.tables:
            return self._on_new_policies(event.tables, now_ns)
        if not self._seats.replace(event.seat, event.reason):
            return []
        return [Notice(f"the default decides from now on as {event.seat}: {event.reason}")]

    def _on_new_policies(self, tables: Mapping[str, PolicyTable], now_ns: int) -> list[Command]:
        """Install policies with fresh states, and ask them again about all that waits."""
        self._installed.install(tables)
        for queue in self._queues:
            queue.hold_until_ns = None
        for group in self.generators:
            group.queue.unblock()
        commands: list[Command] = [
            Notice(f"from now on, {table['use']} decides as {path}")
            for path, table in tables.items()
        ]
        if any("arrival" in seats_in(path, table) for path, table in tables.items()):
            commands += self._gate.ask_again(now_ns, all_held=True)
        return commands

    def _install_policies(self, tables: Mapping[str, PolicyTable]) -> None:
        built: list[tuple[str, Any]] = []
        for path, table in tables.items():
            decision = SEVERAL if path == SEVERAL else POLICY_TABLES[path]
            policy = self._build(decision, without_seats(table) if path == SEVERAL else table)
            PolicyMemory(policy)  # raises if its state cannot be kept
            built.append((path, policy))
        for path, policy in built:
            paths = seats_in(path, tables[path])
            self._seats.install(paths, policy, one_state=path == SEVERAL)
            if "encode.eviction" in paths:
                self.embeddings.replace_eviction(policy)
            if "generate.eviction" in paths:
                for group in self.generators:
                    group.replace_eviction(policy)

    # --- groups come and go ---

    def _on_open(self, event: GroupReady | Resume, now_ns: int) -> list[Command]:
        """Open a group: requests that waited for it are enqueued, oldest first."""
        group, moves = self._groups[event.group], self._moves
        group.set_status(Status.UP)
        commands: list[Command] = []
        if isinstance(group, EncodeGroup):
            self.encode.free_orphaned(group)
        elif isinstance(group, GenerateGroup):
            if isinstance(event, GroupReady):
                group.resize(event.blocks or self.limits.blocks)
            for state in moves.requests_of(group, SUSPENDED):
                commands += moves.enqueue(state, now_ns)
            for other in self.generators:
                if not other.open:
                    commands += moves.move_waiting(other, now_ns)
        return commands

    def _on_group_lost(self, event: GroupLost, now_ns: int) -> list[Command]:
        group = self._groups[event.group]
        if group.status is Status.DRAINING and not event.planned:
            probe("kernel.lost_while_draining")
        if self._recovering(group):
            probe("kernel.second_group_lost")
        if event.planned and not group.idle:
            probe("kernel.restarted_while_running")
        group.set_status(Status.DOWN)
        commands: list[Command] = [Notice(f"{event.group} was lost: {event.failure}")]
        if isinstance(group, EncodeGroup):
            message = (
                "an image could not be encoded: the encoder was lost twice while working on it"
            )
            failed = self.encode.lose_group(group, blame=not event.planned)
            commands += self._moves.fail_all(failed, now_ns, message, code="encode_failed")
        elif isinstance(group, GenerateGroup):
            commands += self._lose_generator(group, now_ns, blame=not event.planned)
        commands.append(RestartGroup(event.group))
        return commands

    def _recovering(self, group: Group) -> bool:
        """Return True if another group of the same stage is down."""
        return any(
            other.status is Status.DOWN
            for other in self._groups.values()
            if other is not group and type(other) is type(group)
        )

    def _lose_generator(self, group: GenerateGroup, now_ns: int, *, blame: bool) -> list[Command]:
        """Keep the requests that ran there, since one may have crashed it; move the waiting ones to other groups."""
        moves = self._moves
        lost, poison = group.lose_requests(blame=blame)
        commands: list[Command] = []
        for state in moves.requests_of(group):
            state.known = False
        if poison is not None:
            message = "the request was running each time the server lost its generate group"
            # The other choices of it, equal but for their seeds, would crash it, too.
            others = self._table.choices_with(poison)
            commands += [
                moves.fail_request(one, now_ns, message, code="group_lost") for one in others
            ]
            probe("kernel.poison_ended")
        for state in lost:
            if state.number in self._table.live:
                commands += moves.enqueue(state, now_ns)
                if state.phase is READY and group.queue.entries[-1].order > state.order:
                    probe("kernel.put_front_at_loss")
        return commands + moves.move_waiting(group, now_ns)

    def _on_retired(self, event: GroupRetired, now_ns: int) -> list[Command]:
        """Move the requests of a lost group to other groups; end them all if no group of the stage is left."""
        group, moves = self._groups[event.group], self._moves
        assert not group.ready, "a group is lost before it is retired"
        group.set_status(Status.RETIRED)
        if isinstance(group, EncodeGroup):
            self.encode.free_orphaned(group)
        commands: list[Command] = [Notice(f"{event.group} is given up: {event.failure}")]
        generators_gone = all(one.retired for one in self.generators)
        if generators_gone or self.encode.gone:
            names = " and ".join(event.failure.groups)
            commands += moves.give_up(f"{names} could not be restarted", now_ns)
        elif isinstance(group, GenerateGroup):
            for state in moves.requests_of(group):
                probe("kernel.retired_with_requests")
                commands += moves.move(state, now_ns)
        return commands

    def _on_drain(self, name: str, now_ns: int) -> list[Command]:
        group = self._groups[name]
        if not group.open:
            return []
        if self._recovering(group):
            probe("kernel.drain_during_recovery")
        group.set_status(Status.DRAINING)
        self._draining[name] = group
        return self._moves.move_waiting(group, now_ns) if isinstance(group, GenerateGroup) else []

    def _take_drained(self) -> list[Command]:
        """Remove the draining groups without work, and return a command for each."""
        drained: list[Command] = []
        for name, group in list(self._draining.items()):
            waiting = (ITEMS, READY, PROMPT)  # requests that will be served there
            awaited = isinstance(group, GenerateGroup) and self._moves.requests_of(group, *waiting)
            if group.ready and (awaited or not group.idle):
                continue
            del self._draining[name]
            if group.status is Status.DRAINING:
                drained.append(Drained(name))
        return drained

    # --- planning ---

    def _plan(self, commands: list[Command], now_ns: int) -> None:
        """Plan steps of dirty groups until there is nothing more to send; append the commands."""
        self._expire(commands, now_ns)
        moves, images, generators = self._moves, self.embeddings.queue.entries, self.generators
        while True:
            if moves.ended_choices:
                commands += moves.release_prompts(now_ns)
            sent = more = False
            for index in self._dirty.walk():
                planned = self._plan_generate(generators[index], commands, now_ns)
                if planned.decision is not None:
                    sent = True
                    more = more or planned.more
            if more:
                continue
            while images and self._plan_encode(commands, now_ns):
                pass  # a new batch lets no generate group do more
            if moves.ended_choices:
                continue
            if sent or not self._break_stall(commands, now_ns):
                break  # a step that was sent is in flight, and no group can send more
        if self._draining:
            commands += self._take_drained()
        if self._faults.notices:
            commands += [Notice(text) for text in self._faults.take_notices()]
        self._set_timer(commands, now_ns)

    def _expire(self, commands: list[Command], now_ns: int) -> None:
        """Expire requests and release holds that are due."""
        if self.limits.waiting_ns:
            commands += self._moves.expire(now_ns)
        for index in self._holds.take_ended(now_ns):
            if index < len(self.generators):  # the last queue is the encoders'
                self._dirty.mark(index)

    def _plan_generate(
        self, group: GenerateGroup, commands: list[Command], now_ns: int
    ) -> PlanResult:
        """Append the next step of a group, if it has one, and return its plan."""
        planned = group.plan(now_ns)
        if planned is NOTHING_PLANNED:
            return planned
        self._loads.change(group.index)
        if planned.more:
            group.mark_dirty()
        self._holds.note_hold(group.index, now_ns)
        for state in planned.requeued:
            commands += self._moves.requeue(state, now_ns)
        if planned.decision is not None:
            commands.append(Decide(group.name, planned.decision))
            for state in planned.prefilled:
                commands += self._moves.after_chunk(state, now_ns)
        return planned

    def _plan_encode(self, commands: list[Command], now_ns: int) -> bool:
        """Append the next batch of items; return False if there is none."""
        batch = self.encode.plan(now_ns)
        self._holds.note_hold(len(self.generators), now_ns)
        if batch is not None:
            commands.append(batch)
        return batch is not None

    def _break_stall(self, commands: list[Command], now_ns: int) -> bool:
        """If nothing is in flight, try to unblock waiting requests; return True if planning may now succeed.

        A request may wait for an item after a prefix that was evicted meanwhile, and could start with an earlier item;
        or a younger request may hold pages that an older one needs. Holds of a policy are no stall.
        """
        if not self._at_rest() or self._holds.first_end() is not None:
            return False
        waiting = [state for state in self._table.live.values() if state.phase is ITEMS]
        waiting.sort(key=lambda state: state.replica)
        for state in waiting:
            commands += self._moves.enqueue(state, now_ns)
        if any(state.phase is READY for state in waiting):
            return True
        if any(group.unblock_oldest() for group in self.generators):
            probe("kernel.stall_unblocked")
            return True
        return False

    def _at_rest(self) -> bool:
        """Return True if nothing is in flight, and groups of both stages are ready."""
        if self.encode.in_flight:
            return False
        for group in self.generators:
            if group.steps_in_flight:
                return False
        return self.encode.ready and any(group.ready for group in self.generators)

    def _set_timer(self, commands: list[Command], now_ns: int) -> None:
        expiries = self._table.expiries
        due_ns = expiries[0][0] if expiries else None
        gate_ns = self._gate.due_ns
        if gate_ns is not None and (due_ns is None or gate_ns < due_ns):
            due_ns = gate_ns
        until_ns = self._holds.first_end()
        if until_ns is not None and (due_ns is None or until_ns < due_ns):
            due_ns = until_ns
        if due_ns is not None and (self._timer_ns is None or due_ns < self._timer_ns):
            self._timer_ns = due_ns
            commands.append(SetTimer(due_ns))

    # --- snapshots ---

    def saved_objects(self) -> ChainMap[Any, Any]:
        return ChainMap[Any, Any](self._table.live, self.embeddings.entries, self._groups)

    def rebuild(self) -> None:
        for index in range(len(self._queues)):
            self._holds.note_hold(index, self._now_ns)

    # --- queries ---

    def watch_policies(self, watch: Callable[[str, Ask], Ask]) -> None:
        """Wrap all policy calls, for example with a timer; `watch` gets the seat's name and the call."""
        self._seats.watch(watch)

    def policy_states(self) -> dict[str, bytes]:
        """Return the encoded states of policies, by seat."""
        return self._seats.states()

    @property
    def requests(self) -> list[RequestState]:
        """The live requests, oldest first."""
        return list(self._table.live.values())

    def phase(self, request_id: str) -> Phase | None:
        """Return the phase of a request; None for an unknown one."""
        state = self._table.find(request_id)
        return None if state is None else state.phase

    @property
    def given_up(self) -> str:
        """Why no request can be served any more; empty while some can."""
        return self._moves.given_up

    def explain(self, request_id: str) -> str:
        """Return the phase of a request and its reason, in words; empty for an unknown one."""
        state = self._table.find(request_id)
        return "" if state is None else self._explain(state, self._now_ns)

    def _explain(self, state: RequestState, now_ns: int) -> str:
        text = self._moves.group_of(state).explain(state, now_ns)
        if state.phase is not ITEMS:
            return text
        entries = [
            self.embeddings.entries[state.items[index].key] for index in sorted(state.wanted)
        ]
        missing = next((one for one in entries if one.phase is not EntryPhase.READY), None)
        return text if missing is None else f"{text}; {self.encode.explain(missing, now_ns)}"

    def live_requests(self, count_max: int, now_ns: int) -> list[RequestRow]:
        """Return views of live requests, oldest first: all with a slot, and the oldest others up to `count_max`."""
        live = self._table.live.values()
        room = max(0, count_max - sum(group.slots_held for group in self.generators))
        shown = [*islice((one for one in live if one.slot < 0), room)]
        shown += [one for one in live if one.slot >= 0]
        shown.sort(key=attrgetter("number"))
        rows = []
        for state in shown:
            group = self._moves.group_of(state)
            why = self._explain(state, now_ns)
            rows.append(live_request(state, group.name, why, group.outputs(state)))
        return rows

    def tenants(self) -> dict[str, dict[str, int]]:
        """Return the number of running and waiting requests by tenant."""
        running: dict[str, int] = {}
        for group in self.generators:
            for state in group.running:
                tenant = state.request.tenant
                running[tenant] = running.get(tenant, 0) + 1
        return {
            tenant: {"running": running.get(tenant, 0), "waiting": count - running.get(tenant, 0)}
            for tenant, count in self._table.tenants.items()
        }

    def arrival_reason(self, arrival_id: int, now_ns: int) -> str:
        """Return why an arriving request is not submitted yet."""
        return self._gate.explain(arrival_id, now_ns)

    def statistics(self) -> dict[str, Any]:
        """Return counters and gauges of requests, stages and groups."""
        groups = {group.name: group.statistics() for group in self.generators}
        generate: dict[str, Any] = {
            name: sum(one[name] for one in groups.values()) for name in next(iter(groups.values()))
        }
        generate["groups"] = {
            group.name: {"state": group.status.value, **groups[group.name]}
            for group in self.generators
        }
        running = sum(group.slots_held for group in self.generators)
        return {
            "running": running,
            "waiting": len(self._table.live) - running,
            "live_bytes": self._table.live_bytes,
            "finished": dict(self._table.finished),
            "refused": dict(self._table.refused),
            "arrival": self._gate.statistics(),
            "policy_faults": dict(self._faults.counts),
            "policy_overruled": self._seats.overruled(),
            "policy_replaced": self._seats.replaced(),
            "passed_over_s": self._passed_over_s(),
            "policy_tables": self._installed.by_seat,
            "encode": self.encode.statistics(),
            "generate": generate,
        }

    def _passed_over_s(self) -> dict[str, float]:
        """Return by group the longest time that policies let others pass a request; `encode` for all images."""
        longest = {"encode": self.embeddings.queue.passed_longest_ns}
        longest |= {one.name: one.passed_longest_ns for one in self.generators}
        return {name: longest_ns / 1e9 for name, longest_ns in longest.items()}

    @property
    def policy_failures(self) -> Mapping[str, TracebackException]:
        """The traceback of each policy's first failure since this scheduler was created, by class name."""
        return self._faults.first

    @property
    def policy_failure_counts(self) -> Mapping[str, int]:
        """Number of failed policy calls since this scheduler was created, by seat."""
        return self._seats.failed()

    def check_invariants(self) -> None:
        """Assert that nothing is lost or owned twice, and that no request is stuck."""
        live = self._table.live
        self._moves.check()
        self._gate.check()
        self.embeddings.check(live, self.encode.orphaned)
        assert self._table.live_bytes == sum(state.host_bytes for state in live.values())
        holds = [queue.held_until(self._now_ns) for queue in self._queues]
        held = min((until_ns for until_ns in holds if until_ns is not None), default=None)
        assert held == self._holds.first_end(), "entries are held until another time than is noted"
        assert not held or self._timer_ns is not None, "entries are held, and no timer is set"
        at_rest = self._at_rest() and not held and not self.encode.orphaned
        for group in self.generators:
            own = self._moves.requests_of(group)
            group.check(own)
            if group.index not in self._dirty:
                planned = group.plan(self._now_ns)
                idle = planned.decision is None and not (planned.requeued or planned.more)
                assert idle, f"{group.name} could plan, and is not dirty"
            stuck = [state for state in own if group.accepts(state) or state.slot >= 0]
            if at_rest and stuck:
                why = [group.explain(state, self._now_ns) for state in stuck]
                raise AssertionError(f"stuck in {group.name}: {why}")
        self._loads.check()
