"""The fast simulator: the production scheduler and policies, an event heap, and groups that only model time.

There is no event loop, network or memory, so a policy can be tried on an hour of load in seconds.
The scheduler decides exactly as in a server that receives the same events at the same times.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from heapq import heappop, heappush
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from vsched.assembly import rank_kv_bytes_per_token
from vsched.config import Config, LoadedConfig
from vsched.errors import VschedError
from vsched.kernel import Scheduler
from vsched.kernel.commands import (
    Accept,
    AdmitArrival,
    Command,
    Decide,
    EmitTokens,
    Finish,
    Refuse,
    RejectArrival,
    SetTimer,
)
from vsched.kernel.events import (
    Aborted,
    Arrived,
    Event,
    GroupLost,
    GroupReady,
    GroupRetired,
    Submitted,
    TimerFired,
    Withdrawn,
)
from vsched.policy import Policy
from vsched.policy_host.seats import Ask
from vsched.sim.cost.model import CostModel
from vsched.sim.fast.groups import (
    Contention,
    GroupOutage,
    SharedWork,
    SimulatedGroup,
    TimedEncodeGroup,
    TimedGenerateGroup,
    make_devices,
    outage_events,
)
from vsched.sim.fast.ingress import ImageJob, IncomingRequest, Ingress
from vsched.sim.fast.metrics import (
    Collector,
    LiveRequest,
    Sampler,
    SimulationOutcome,
    Targets,
    figures_of,
    over_replicas,
)
from vsched.sim.invariants import Oracles, SimulationFailed
from vsched.sim.setup import Setup, prepare
from vsched.sim.workload.requests import Arrival, RequestMaker, Workload
from vsched.types import FinishReason, ModelInfo, group_names

if TYPE_CHECKING:
    from vsched.record.replay import EventObserver

START_NS = 1_000_000
"""Kernel time of the start of a workload: the kernel reads 0 as "never"."""
PROGRESS_EVERY = 64
REPLIED_MAX = 1 << 16
"""Maximum number of conversations whose last reply is remembered until their next turn; the oldest are forgotten."""
LEFT = FinishReason.ABORT.value
"""Code of requests whose clients disconnected."""
Happen = Callable[[Any, int], Event | None]
"""Lets something happen to the subject of a heap entry at its time; returns the event for the scheduler, if any."""
OnRequests = Callable[[int], None]
"""Called with the number of ended requests."""


class Simulation:
    """One run; use it through `vsched.sim.fast.simulation.simulate`."""

    def __init__(
        self,
        setup: Setup,
        cost: CostModel,
        *,
        seed: int,
        targets: Targets,
        observers: Sequence[EventObserver] = (),
        oracles: Oracles | None = None,
        outages: Iterable[GroupOutage] = (),
    ) -> None:
        """Prepare a run.

        Raises:
            ConfigError: When an outage is of an unknown group.
        """
        self.setup = setup
        self.kernel = Scheduler(setup.limits, setup.policies.for_kernel())
        self.collector = Collector(targets, START_NS)
        self.sampler = Sampler(START_NS)
        self.live_requests: dict[int, LiveRequest] = {}
        self.events = 0
        self.now_ns = 0
        self._seed = seed
        self._cost = cost
        self._targets = targets
        self._observers = [*observers, *([oracles] if oracles is not None else [])]
        self._heap: list[tuple[int, int, Happen, Any, int | None]] = []
        self._sequence = itertools.count()
        self._digest = blake2b(digest_size=16)
        self._digested = bytearray()
        self._arrivals: Iterator[Arrival] = iter(())
        self._talking: dict[str, deque[Arrival]] = {}
        self._replied_ns: dict[str, int] = {}
        self._entering: LiveRequest | None = None
        self._arrival_ids = itertools.count(1)
        self._at_gate: dict[int, tuple[Arrival, int]] = {}
        self._may_leave: set[int] = set()
        self._maker = RequestMaker(
            setup.info,
            setup.limits,
            bytes_per_token=cost.bytes_per_token,
            item_tokens_max=setup.item_tokens_max,
            adapted_images=setup.config.adapters.encoder,
        )
        self._ingress = Ingress(
            setup.config,
            cost,
            self._maker,
            on_job=self._start_work,
            on_ready=lambda at_ns, prepared: self._push(at_ns, self._submit, prepared),
            on_refused=self._refused,
        )
        slowdowns = cost.host.contention
        self._contention = Contention(slowdowns, self._announce) if slowdowns else None
        self._make_groups(exact_tokens=bool(observers))
        for at_ns, event in outage_events(outages, [*self._groups.values()]):
            self._push(START_NS + at_ns, self._change, event)

    def _make_groups(self, *, exact_tokens: bool) -> None:
        limits, cost = self.setup.limits, self._cost
        block_bytes = limits.block_size * rank_kv_bytes_per_token(
            self.setup.config, self.setup.info
        )
        encoders = group_names("encode", limits.encoders)
        generators = group_names("generate", limits.generators)
        together = self.setup.config.placement == "together"
        devices = make_devices(encoders, generators, together=together)
        self.encoders = [
            TimedEncodeGroup(name, cost, devices[name], Random(f"{name} {self._seed}"))  # noqa: S311
            for name in encoders
        ]
        self.generators = [
            TimedGenerateGroup(
                name,
                cost,
                devices[name],
                Random(f"{name} {self._seed}"),  # noqa: S311 - noise of step times
                slots=limits.slots,
                live_requests=self.live_requests,
                itl=self.collector.itl,
                block_bytes=block_bytes,
                exact_tokens=exact_tokens,
            )
            for name in generators
        ]
        groups: list[SimulatedGroup] = [*self.encoders, *self.generators]
        self._groups = {group.name: group for group in groups}
        for group in groups:
            self._push(START_NS, self._change, GroupReady(group.name))

    # --- the loop ---

    def run_workload(self, workload: Workload, progress: OnRequests | None = None) -> None:
        """Run a workload until no event is left.

        Raises:
            SimulationFailed: See `simulate`.
        """
        self._arrivals = iter(workload)
        self._next_arrival()
        try:
            self._loop(progress)
            if self.live_requests or self._talking or self._ingress.preparing or self._at_gate:
                names = [live.arrival.request_id for live in self.live_requests.values()][:5]
                raise AssertionError(
                    f"{len(self.live_requests)} requests never ended, such as {', '.join(names) or 'none'}"
                )
        except VschedError:
            raise
        except Exception as error:
            raise SimulationFailed(
                f"seed {self._seed}, event {self.events}, {self.now_ns / 1e9:.6f} s: "
                f"{type(error).__name__}: {error}. The same seed, configuration and workload show it again"
            ) from error

    def _loop(self, progress: OnRequests | None) -> None:
        heap, sampler = self._heap, self.sampler
        handle, groups, observers = self.kernel.handle, self._groups, self._observers
        encode_into, digested = msgspec.msgpack.Encoder().encode_into, self._digested
        while heap:
            now_ns, _, happen, subject, incarnation = heappop(heap)
            if now_ns >= sampler.due_ns:
                self._sample(now_ns)
            if incarnation is not None and incarnation != subject.incarnation:
                continue  # lost or rescheduled meanwhile
            event = happen(subject, now_ns)
            if event is None:
                continue
            self.events += 1
            self.now_ns = now_ns
            commands = handle(event, now_ns)
            encode_into((now_ns, commands), digested, -1)
            for command in commands:
                if type(command) is Decide:
                    group = groups[command.group]
                    end_ns = group.decide(command.decision, now_ns)
                    if end_ns:
                        self._start_work(group, end_ns, now_ns)
                elif type(command) is not EmitTokens:
                    self._obey(command, now_ns, progress)
            for observer in observers:
                observer.see(now_ns, event, commands, self.kernel)
        self._take_digest()

    def _take_digest(self) -> None:
        self._digest.update(self._digested)
        self._digested.clear()

    def _start_work(self, work: SharedWork, end_ns: int, now_ns: int) -> None:
        """Start a step or a job with the given end, which contention may delay."""
        if self._contention is None:
            self._announce(work, end_ns)
        else:
            self._contention.enter(work, end_ns - now_ns, now_ns)

    def _end_step(self, group: SimulatedGroup, now_ns: int) -> Event | None:
        """End the step of a group; return the resulting event, if any."""
        event = group.end_step(now_ns)
        if self._contention is not None or group.device.ready:
            self._free_device(group, now_ns)
        return event

    def _free_device(self, group: SimulatedGroup, now_ns: int) -> None:
        """Free the group's device: a group that shares it starts its step, or the same group continues."""
        ready = group.device.ready
        if self._contention is not None:
            self._contention.leave(group, now_ns)
            if ready:
                self._start_work(ready[0], ready[0].begin_step(now_ns), now_ns)
        elif ready:
            self._announce(ready[0], ready[0].begin_step(now_ns))

    def _announce(self, work: SharedWork, end_ns: int) -> None:
        happen: Happen = self._end_job if type(work) is ImageJob else self._end_step
        heappush(self._heap, (end_ns, next(self._sequence), happen, work, work.incarnation))

    def _push(self, at_ns: int, happen: Happen, subject: object) -> None:
        heappush(self._heap, (at_ns, next(self._sequence), happen, subject, None))

    # --- heap entries ---

    def _end_job(self, job: ImageJob, now_ns: int) -> None:
        if self._contention is not None:
            self._contention.leave(job, now_ns)
        self._ingress.finish_job(job, now_ns)

    def _take_sent(self, arrival: Arrival, now_ns: int) -> Arrived | None:
        """Count a request, and send it unless its client waits for the earlier turn, or thinks about it."""
        self._next_arrival()
        self.collector.arrived(now_ns, arrival.tenant)
        if arrival.conversation:
            waiting = self._talking.get(arrival.conversation)
            if waiting is not None:
                waiting.append(arrival)
                return None
            self._talking[arrival.conversation] = deque()
            ended_ns = self._replied_ns.pop(arrival.conversation, None)
            if ended_ns is not None and ended_ns + arrival.think_ns > now_ns:
                self._push(ended_ns + arrival.think_ns, self._arrive, arrival)
                return None
        return self._arrive(arrival, now_ns)

    def _arrive(self, arrival: Arrival, now_ns: int) -> Arrived:
        arrival_id = next(self._arrival_ids)
        self._at_gate[arrival_id] = arrival, now_ns
        if arrival.leaves_ns is not None:
            self._push(now_ns + arrival.leaves_ns, self._disconnect, (arrival_id, arrival))
        return Arrived(
            arrival_id,
            arrival.tenant,
            arrival.priority,
            arrival.ttft_target_ms,
            images=len(arrival.media),
            outputs_max=min(arrival.outputs_max, self.setup.limits.context_tokens),
            session=arrival.conversation,
        )

    def _submit(self, prepared: IncomingRequest, now_ns: int) -> Submitted | Withdrawn:
        """Submit a prepared request, unless its client left meanwhile."""
        self._ingress.submitted()
        arrival, arrival_id = prepared.arrival, prepared.arrival_id
        if arrival.leaves_ns is not None:
            if arrival_id not in self._may_leave:
                return self._withdraw(arrival_id, arrival, prepared.pixels, now_ns)
            self._may_leave.remove(arrival_id)
        request = self._maker.request(arrival)
        outputs = min(arrival.output_tokens, request.sampling.max_tokens)
        self._entering = LiveRequest(
            msgspec.structs.replace(arrival, output_tokens=outputs),
            sent_ns=prepared.sent_ns,
            prompt_tokens=len(request.prompt_token_ids),
            pixels=prepared.pixels,
        )
        return Submitted(request, arrival_id=arrival_id)

    def _disconnect(self, client: tuple[int, Arrival], now_ns: int) -> Event | None:
        """Let the client of a request leave; the scheduler ignores the abort of a request that has ended."""
        arrival_id, arrival = client
        if self._at_gate.pop(arrival_id, None) is not None:
            return self._withdraw(arrival_id, arrival, {}, now_ns)
        if arrival_id in self._may_leave:  # in preparation
            self._may_leave.remove(arrival_id)
            return None
        return Aborted(arrival.request_id)

    def _withdraw(
        self, arrival_id: int, arrival: Arrival, pixels: Mapping[str, int], now_ns: int
    ) -> Withdrawn:
        """Record a request whose client left before it was submitted."""
        self.collector.count_failure(LEFT, arrival.tenant)
        self._ended(arrival, pixels, now_ns)
        return Withdrawn(arrival_id)

    def _change(self, event: GroupLost | GroupReady | GroupRetired, now_ns: int) -> Event:
        """Let a group be lost, return, or be given up."""
        if isinstance(event, GroupLost):
            group = self._groups[event.group]
            was_running = group.device.running is group
            group.forget_steps()
            if was_running:
                self._free_device(group, now_ns)
        return event

    def _next_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self._push(max(START_NS + arrival.at_ns, self.now_ns), self._take_sent, arrival)

    # --- commands of the scheduler ---

    def _obey(self, command: Command, now_ns: int, progress: OnRequests | None) -> None:
        match command:
            case SetTimer(deadline_ns):
                self._push(deadline_ns, lambda *_: TimerFired(), None)
            case AdmitArrival(arrival_id):
                arrival, sent_ns = self._at_gate.pop(arrival_id)
                if arrival.leaves_ns is not None:
                    self._may_leave.add(arrival_id)
                self._ingress.prepare_request(
                    arrival, now_ns, arrival_id=arrival_id, sent_ns=sent_ns
                )
            case RejectArrival(arrival_id):
                arrival, _ = self._at_gate.pop(arrival_id)
                code = "redirected" if command.base_url else "shed"
                self.collector.count_failure(code, arrival.tenant, command.reason)
                self._ended(arrival, {}, now_ns)
            case Accept(_, number):
                entering, self._entering = self._entering, None
                assert entering is not None, "accepted without being submitted"
                self.live_requests[number] = entering
            case Finish(_, number):
                self._take_digest()
                live = self.live_requests.pop(number)
                self.collector.count_end(live, command, now_ns)
                self._ended(live.arrival, live.pixels, now_ns)
                if progress is not None and self.collector.finished % PROGRESS_EVERY == 0:
                    progress(self.collector.finished)
            case Refuse():
                entering, self._entering = self._entering, None
                assert entering is not None, "refused without being submitted"
                self.collector.count_failure(command.code, entering.arrival.tenant)
                self._ended(entering.arrival, entering.pixels, now_ns)
            case _:
                pass  # notices, and group restarts: the fault plan determines when groups return

    def _refused(self, prepared: IncomingRequest, code: str, now_ns: int) -> None:
        """Record a request refused at intake."""
        self._may_leave.discard(prepared.arrival_id)
        self.collector.count_failure(code, prepared.arrival.tenant)
        self._push(now_ns, lambda *_: Withdrawn(prepared.arrival_id), None)
        self._ended(prepared.arrival, {}, now_ns)

    def _ended(self, arrival: Arrival, pixels: Mapping[str, int], now_ns: int) -> None:
        if pixels:
            self._ingress.release(pixels, now_ns)
        if arrival.conversation:
            waiting = self._talking[arrival.conversation]
            if waiting:
                following = waiting.popleft()
                self._push(now_ns + following.think_ns, self._arrive, following)
            else:
                del self._talking[arrival.conversation]
                self._replied_ns[arrival.conversation] = now_ns
                if len(self._replied_ns) > REPLIED_MAX:
                    del self._replied_ns[next(iter(self._replied_ns))]

    # --- figures ---

    def _sample(self, now_ns: int) -> None:
        self._take_digest()
        statistics = self.kernel.statistics()
        encode, generate = statistics["encode"], statistics["generate"]
        pages = encode["pages_total"]
        used = pages - encode["pages_free"] - encode["pages_evictable"]
        gauges = (
            statistics["waiting"] + self._ingress.preparing,
            statistics["running"],
            encode["waiting_items"],
            generate["blocks_held"] / generate["blocks_total"],
            used / max(pages, 1),
        )
        self.sampler.take_samples(now_ns, gauges, self._totals())

    def _totals(self) -> tuple[int, ...]:
        encoders, generators = self.encoders, self.generators
        return (
            sum(group.steps for group in generators),
            sum(group.decoded for group in generators),
            sum(group.prefilled for group in generators),
            sum(group.steps for group in encoders),
            sum(group.items for group in encoders),
            sum(group.tokens for group in encoders),
            sum(group.busy_ns for group in encoders),
            sum(group.busy_ns for group in generators),
        )

    def outcome(self, label: str, workload: Workload, wall_s: float) -> SimulationOutcome:
        """Return the outcome."""
        collector = self.collector
        policies = self.setup.policies.by_table
        groups = len(self.encoders), len(self.generators)
        return SimulationOutcome(
            label=label,
            workload=workload.name,
            seed=self._seed,
            cost=self._cost.name,
            targets=self._targets,
            policies={table: repr(policy) for table, policy in policies.items()},
            groups=groups,
            scaled_down=self._maker.scaled_down,
            events=self.events,
            digest=self._digest.hexdigest(),
            wall_s=wall_s,
            figures=figures_of(
                collector,
                self._totals(),
                groups=groups,
                kernel=self.kernel.statistics(),
            ),
            series=self.sampler.series(),
            cdf={**collector.cdf(), "itl": collector.itl.cdf_ms(), "e2e": collector.e2e.cdf_ms()},
            policy_failure_counts=over_replicas(self.kernel.policy_failure_counts),
            policy_failures={
                name: "".join(trace.format()) for name, trace in self.kernel.policy_failures.items()
            },
        )


def simulate(
    config: Config | LoadedConfig,
    workload: Workload,
    *,
    cost: CostModel,
    seed: int = 0,
    oracles: bool = False,
    progress: OnRequests | None = None,
    label: str = "",
    policies: Mapping[str, Policy] | None = None,
    outages: Sequence[GroupOutage] = (),
    targets: Targets | None = None,
    info: ModelInfo | None = None,
    kv_tokens: int | None = None,
    observers: Sequence[EventObserver] = (),
    watch: Callable[[str, Ask], Ask] | None = None,
) -> SimulationOutcome:
    """Simulate a workload on a server with a configuration.

    Args:
        config: The configuration; only settings of the scheduler and of request intake matter.
        workload: The requests; read as time passes.
        cost: The cost model.
        seed: Seed of the step time noise, if the cost model has any.
        oracles: Whether to check all invariants after every event; see `Oracles`.
        progress: Called occasionally with the number of ended requests.
        label: Name of the outcome.
        policies: Replacements for configured policies, by table, such as `encode.encoding`. The table `policy` stands
            for all tables that the policy has methods for and that are not named. An object that several tables name
            has one state for all of them.
        outages: Losses of groups; times count from the start of the workload.
        targets: Latency targets for goodput.
        info: The model's shape, if not the cost model's.
        kv_tokens: Tokens of a replica's KV cache, if not pinned by `generate.memory`.
        observers: Called with every event; with observers, the tokens of a step show which slots
            yielded one.
        watch: Wraps the call of each policy, for example with a timer; gets the seat's name and the call.

    Raises:
        ConfigError: When the configuration, the model and the outages do not fit together.
        SimulationFailed: When the kernel or an oracle found an error.
    """
    setup = prepare(config, cost, policies=policies, info=info, kv_tokens=kv_tokens)
    simulation = Simulation(
        setup,
        cost,
        seed=seed,
        targets=targets or Targets(),
        observers=observers,
        oracles=Oracles(setup) if oracles else None,
        outages=outages,
    )
    if watch is not None:
        simulation.kernel.watch_policies(watch)
    started_s = time.perf_counter()
    with _rare_collections():
        simulation.run_workload(workload, progress)
    wall_s = time.perf_counter() - started_s
    return simulation.outcome(label or workload.name, workload, wall_s)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Make garbage collection rare: the kernel creates no cycles, and collection takes a tenth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
