"""A simulated engine: `vsched.engine.Engine` with its HTTP application, on a simulated environment.

Kernel, shell, worker groups, leaders, decision logs, ranks up to their workers, KV cache sizing,
supervisor, administration, streams, media pipeline and HTTP are production code.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Any, Literal, Self

import msgspec

from vsched.aio.worker_groups import RESTART_DELAYS_S
from vsched.api.app import create_app
from vsched.api.contract import ApiSettings
from vsched.config import (
    ArenaConfig,
    Config,
    DeadlinesConfig,
    EncodeConfig,
    GenerateConfig,
    ModelConfig,
    resolve_policies,
)
from vsched.config.sections import PolicyTable
from vsched.engine import Engine, Environment
from vsched.errors import ConfigError
from vsched.kernel import Scheduler
from vsched.kernel.commands import Accept, Command, Finish, Refuse
from vsched.kernel.events import Aborted, Event, GroupLost, GroupReady, GroupRetired, Submitted
from vsched.sim.cluster.client_sessions import (
    FIRST_SEED,
    TENANT_HEADER,
    ClientBehaviour,
    ClientSession,
)
from vsched.sim.cluster.machines import SimulatedCluster
from vsched.sim.cluster.media import media_of
from vsched.sim.cost.model import CostModel
from vsched.sim.faults import (
    DecodeError,
    Disconnect,
    FaultPlan,
    FetchStall,
    Hang,
    HostCrash,
    HostCut,
    LateHeartbeat,
    LostHeartbeat,
    MessageFault,
    MissedDecision,
    OutOfMemory,
    Partition,
    ReplicaRestart,
    SlowHostLink,
    Struck,
    TiePermutation,
    WorkerCrash,
)
from vsched.sim.invariants import Oracles, SimulationFailed
from vsched.sim.loop import VirtualLoop
from vsched.sim.network.asgi_client import AsgiClient
from vsched.sim.network.links import HostLinkProfile, LinkProfile
from vsched.sim.ranks.plugin import NAME
from vsched.sim.ranks.symbolic_model import FIRST_TOKEN, TOKENS, SymbolicGrammars
from vsched.sim.setup import Setup
from vsched.sim.workload.requests import Arrival
from vsched.sim.world import ORIGIN_NS, QUICK, Delays, World
from vsched.types import ModelInfo, Request, group_names, stage_of


class GroupLoss(msgspec.Struct, frozen=True):
    """A group loss; `back_ns` is when the group was ready again, or None."""

    group: str
    at_ns: int
    reason: str
    planned: bool
    back_ns: int | None = None


class EngineObserver:
    """Takes the place of a kernel record; see `vsched.aio.shell.EventRecorder`.

    Attributes:
        kernel: The observed scheduler.
        losses: Group losses, in order.
        retired: Groups that did not return.
        on_event: Called after each event, before its commands are executed.
        on_accept: Called with the kernel's request number and the request.
    """

    def __init__(
        self,
        world: World,
        config: Config,
        info: ModelInfo,
        kernel: Scheduler,
        *,
        allow_policy_failures: bool = False,
    ) -> None:
        """Start observing; a policy failure is a violation unless `allow_policy_failures`."""
        self.kernel = kernel
        self.losses: list[GroupLoss] = []
        self.retired: list[str] = []
        self.on_event: Callable[[], None] = lambda: None
        self.on_accept: Callable[[int, Request], None] = lambda _number, _request: None
        self.events = 0
        self._world = world
        policies = resolve_policies(config)
        setup = Setup(config=config, info=info, limits=kernel.limits, policies=policies)
        self._oracles = Oracles(setup, check_every=1)
        self._digest = blake2b(digest_size=16)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=bytes)
        self._broken = False
        self._allow_policy_failures = allow_policy_failures
        self._failed_policies = 0
        self._ids: dict[str, bytes] = {}

    def record_event(self, event: Event, now_ns: int, commands: Sequence[Command]) -> None:
        """Record an event."""
        self.events += 1
        self._digest.update(self._words(event, now_ns, commands))
        self._follow(event, now_ns, commands)
        if not self._broken:
            try:
                self._oracles.see(now_ns, event, commands, self.kernel)
            except AssertionError as error:
                self._broken = True  # the oracles' state is invalid from here on
                self._world.violate(f"after {type(event).__name__}: {error}")
        if len(self.kernel.policy_failures) > self._failed_policies:
            self._note_policy_failures()
        self.on_event()

    def _note_policy_failures(self) -> None:
        """Report the first failure of each policy as a violation: the default policy decided instead."""
        failures = list(self.kernel.policy_failures.items())
        for name, trace in failures[self._failed_policies :]:
            if not self._allow_policy_failures:
                self._world.violate(f"policy {name} failed:\n{''.join(trace.format())}")
        self._failed_policies = len(failures)

    def close(self) -> None:
        """No-op."""

    @property
    def digest(self) -> str:
        """Digest of all events and commands so far, with their times."""
        return self._digest.hexdigest()

    def _words(self, event: Event, now_ns: int, commands: Sequence[Command]) -> bytes:
        """Encode an event and its commands, with random request ids replaced by their order of arrival."""
        words = self._encoder.encode((now_ns, type(event).__name__, event, list(commands)))
        named = [one for one in (event, *commands) if isinstance(one, _NAMED)]
        for one in named:
            name = one.request.request_id if isinstance(one, Submitted) else one.request_id
            number = self._ids.setdefault(name, b"#%d" % len(self._ids))
            words = words.replace(name.encode(), number)
        return words

    def _follow(self, event: Event, now_ns: int, commands: Sequence[Command]) -> None:
        match event:
            case Submitted(request):
                for command in commands:
                    if isinstance(command, Accept):
                        self._world.items[command.number] = request.items
                        if command.request_id == request.request_id:
                            self.on_accept(command.number, request)
            case GroupLost(group, failure, planned):
                self.losses.append(GroupLoss(group, now_ns, str(failure), planned))
            case GroupReady(group):
                for place, loss in enumerate(self.losses):
                    if loss.group == group and loss.back_ns is None:
                        self.losses[place] = msgspec.structs.replace(loss, back_ns=now_ns)
            case GroupRetired(group):
                self.retired.append(group)
            case _:
                pass


_NAMED = (Submitted, Aborted, Accept, Refuse, Finish)


SECOND_NS = 1_000_000_000
AT_ONCE_S = 0.05
"""Maximum time to detect a process exit or a rank's error report."""
BROKEN_S = 1.0
"""Maximum time to detect a broken connection: the close arrives after all bytes in flight."""
HARMLESS = (
    Disconnect,
    TiePermutation,
    DecodeError,
    FetchStall,
    LostHeartbeat,
    LateHeartbeat,
    ReplicaRestart,
)
"""Faults that must not cause a group loss."""
ALWAYS_REFUSED = (
    "queue_full",
    "rate_limit_exceeded",
    "context_exceeded",
    "context_length_exceeded",
    "images_exceed_cache",
)
"""Error codes of the library and of HTTP that are always possible."""
POLL_S = 0.5
RECOVERY_S = 60.0
"""Sum of all restart delays and as many starts."""


def silence_s(deadlines: DeadlinesConfig) -> float:
    """Return the maximum time to detect silence, in seconds."""
    return deadlines.rank_timeout_s + 2 * deadlines.heartbeat_s + deadlines.rank_timeout_s / 4


def limits_s(struck: Struck, deadlines: DeadlinesConfig) -> float | None:
    """Return the maximum seconds from a fault to the loss of its group; None if the group may survive."""
    fault = struck.fault
    beat_s = deadlines.heartbeat_s
    silent_s = silence_s(deadlines)
    match fault:
        case WorkerCrash():
            return AT_ONCE_S
        case OutOfMemory(during="step") if stage_of(fault.group) == "generate":
            return deadlines.step_s + 2 * beat_s  # the step runs first
        case MissedDecision():
            return deadlines.step_s + 2 * beat_s
        case Hang() if fault.end_ns - struck.now_ns > (silent_s + beat_s) * SECOND_NS:
            return silent_s
        case _:
            return None


def check_detection(run: SimEngine, observer: EngineObserver) -> None:
    """Check that every fault that disables a group is detected in bounded time.

    A report that a cut or slow link to its host holds up is late, and then silence is detected.
    """
    world, deadlines, hosts = run.world, run.config.deadlines, run.launcher.hosts
    now_ns, slow = world.loop.now_ns(), _slow_hosts(world)
    for struck in world.injector.struck:
        limit_s = limits_s(struck, deadlines)
        if limit_s is None:
            continue
        group = getattr(struck.fault, "group", "")
        if not slow.isdisjoint(hosts.get(group, ())):
            limit_s = max(limit_s, silence_s(deadlines))
        until_ns = struck.now_ns + int((limit_s + AT_ONCE_S) * SECOND_NS)
        if until_ns < now_ns and not _was_lost(observer, group, struck.now_ns, until_ns):
            at_s = struck.now_ns / SECOND_NS
            world.violate(
                f"not noticed within {limit_s:g} s: {struck.fault} struck at {at_s:.9f} s"
            )


def check_hosts(run: SimEngine, observer: EngineObserver) -> None:
    """Check that every lasting host fault takes down all groups of the host, in bounded time."""
    world, deadlines = run.world, run.config.deadlines
    slow = _slow_hosts(world)
    for strike in run.launcher.strikes:
        fault = strike.fault
        reported = (
            isinstance(fault, HostCrash) and fault.mode == "killed" and fault.host not in slow
        )
        limit_s = BROKEN_S if reported else silence_s(deadlines) + AT_ONCE_S
        until_ns = strike.at_ns + int(limit_s * SECOND_NS)
        if until_ns >= world.loop.now_ns() or not (
            isinstance(fault, HostCrash) or fault.end_ns > until_ns
        ):
            continue
        for group in strike.groups:
            if not _was_lost(observer, group, strike.at_ns, until_ns):
                world.violate(f"{group} was not lost in time with its host: {fault}")


def _slow_hosts(world: World) -> set[str]:
    """Return the hosts whose links are cut or slow at some time."""
    faults = world.injector.plan.faults
    return {fault.host for fault in faults if isinstance(fault, HostCut | SlowHostLink)}


def _was_lost(observer: EngineObserver, group: str, since_ns: int, until_ns: int) -> bool:
    """Return True if a group went down or was down in this interval."""
    return any(
        loss.group == group
        and loss.at_ns <= until_ns
        and (loss.back_ns is None or loss.back_ns >= since_ns)
        for loss in observer.losses
    )


def check_causes(world: World, observer: EngineObserver) -> None:
    """Check that every group loss has a fault as its cause."""
    causes = [one.fault for one in world.injector.struck if not isinstance(one.fault, HARMLESS)]
    wires = [one for one in causes if isinstance(one, MessageFault | MissedDecision | Partition)]
    for loss in observer.losses:
        found = wires if "RankDesync" in loss.reason else causes
        world.expect(found or loss.planned, f"{loss.group} was lost without a cause: {loss.reason}")


def check_ends(run: SimEngine) -> None:
    """Check that requests end without an error unless a fault explains it."""
    kinds = {type(fault) for fault in run.plan.faults}
    losses = run.observer.losses if run.observer is not None else []
    allowed = set(ALWAYS_REFUSED)
    if FetchStall in kinds:
        allowed |= {"image_fetch_failed", "prepare_timeout"}
    if DecodeError in kinds:
        allowed |= {"image_invalid"}
    if OutOfMemory in kinds or losses:
        allowed |= {"encode_failed"}
    if losses:
        allowed |= {"group_lost", "given_up", "failed", "not_ready", "prepare_timeout"}
    if losses or run.config.deadlines.waiting_s:
        allowed |= {"expired"}
    if any(operation.action == "clear" for operation in run.operations):
        allowed |= {"cleared"}
    if run.was_shut_down:
        allowed |= {"stopping", "stopped", "not_ready"}
    for session in run.sessions:
        if session.outcome in ("refused", "failed"):
            run.world.expect(
                session.code in allowed,
                f"{session}: {session.outcome} with {session.code!r}: {session.message}",
            )


async def check_healed(run: SimEngine) -> None:
    """Check the state after the last fault: all groups are back or correctly retired, and nothing is held."""
    world, observer, served = run.world, run.observer, run.engine
    if observer is None:
        return
    limits = run.config.deadlines
    try:
        async with asyncio.timeout(RECOVERY_S):
            rests_s = 0.0
            # long enough to see a late loss
            while rests_s < limits.rank_timeout_s + 3 * limits.heartbeat_s:
                await asyncio.sleep(POLL_S)
                rests_s = rests_s + POLL_S if _rests(run, observer) else 0.0
    except TimeoutError:
        world.violate(f"not back within {RECOVERY_S:g} s: {served.groups()}")
    check_detection(run, observer)
    check_hosts(run, observer)
    _check_given_up(run)
    check_causes(world, observer)
    check_ends(run)
    if served.state in ("ready", "degraded"):
        _check_nothing_held(run, observer)


def _check_given_up(run: SimEngine) -> None:
    """Check that a group was retired only after all restart attempts."""
    for row in run.engine.groups():
        launches = run.world.launches[row["name"]]
        given_up = row["state"] == "retired"
        run.world.expect(
            not given_up or launches > len(RESTART_DELAYS_S),
            f"{row['name']} was retired after {launches} starts",
        )


def _rests(run: SimEngine, observer: EngineObserver) -> bool:
    """Return True if all groups are back and no step is in flight."""
    if run.engine.state not in ("ready", "degraded"):
        return True
    kernel = observer.kernel
    back = all(group["state"] in ("up", "retired") for group in run.engine.groups())
    return (
        back
        and not kernel.encode.in_flight
        and not any(one.steps_in_flight for one in kernel.generators)
    )


def _check_nothing_held(run: SimEngine, observer: EngineObserver) -> None:
    expect = run.world.expect
    kernel = observer.kernel
    statistics = run.engine.statistics()
    media = statistics["media"]
    held = {
        "requests": statistics["running"] + statistics["waiting"],
        "bytes of requests": statistics["live_bytes"],
        "items in the queue": len(kernel.embeddings.queue),
        "claims on embeddings": sum(len(entry.claims) + entry.pins for entry in kernel.embeddings),
        "KV blocks": sum(stage.statistics()["blocks_held"] for stage in kernel.generators),
        "slots": sum(stage.slots_held for stage in kernel.generators),
        "load": sum(stage.load_tokens for stage in kernel.generators),
        "preparations": media["preparing"],
        "bytes of preparations": media["preparing_bytes"],
        "memory to decode in": media["decode"]["bytes_used"],
        "pixels": media["pixels"]["bytes_held"],
        "requests that wait for pixels": media["pixels"]["waiting"],
    }
    for what, count in held.items():
        expect(not count, f"at the end, {what} are held without an owner: {count}")
    for stage in kernel.generators:
        for rank in run.launcher.ranks:
            kept = rank.sequences(stage.name) if rank.alive else None
            expect(
                kept is None or kept == stage.unannounced,
                f"in the end, a rank of {stage.name} keeps requests {kept}, not {stage.unannounced}",
            )


Action = Literal["drain", "restart", "resume", "clear", "look", "load", "unload", "replace"]
LOOKS = ("/health", "/metrics", "/admin/statistics", "/admin/replicas", "/v1/models")
UNDERSTOOD = (200, 409, 503)
"""Expected statuses: done, not possible now, not served any more."""
EXTRA = "extra"
"""The adapter that operators load and unload; no request names it."""
POLICIES = {
    "generate.admission": ("fifo", "priority", "tenant-fair", "shortest-first"),
    "generate.step": ("shortest-remaining", "in-order", "slo-feedback", "tenant-fair"),
    "generate.preemption": ("youngest", "cheapest"),
    "generate.eviction": ("lru", "s3-fifo", "none"),
    "generate.insertion": ("everything", "matching"),
    "encode.eviction": ("lru", "s3-fifo", "none"),
    "routing": ("least-loaded", "round-robin", "image-affinity"),
}
"""Policies that operators install while requests run, by the paths of their tables."""


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """An operator action; `group` is set for actions on a group, `policies` for `replace`."""

    at_ns: int
    action: Action
    group: str = ""
    policies: dict[str, PolicyTable] = {}


def draw_operations(
    rng: random.Random, groups: Sequence[str], span_ns: int
) -> tuple[Operation, ...]:
    """Draw the operator actions of a scenario; most have none."""
    if rng.random() < 0.7:
        return ()
    actions: list[Action] = ["drain", "drain", "restart", "resume", "resume", "clear", "look"]
    drawn = [
        Operation(
            at_ns=rng.randrange(span_ns), action=rng.choice(actions), group=rng.choice(groups)
        )
        for _ in range(rng.randint(1, 5))
    ]
    return tuple(sorted(drawn, key=lambda operation: operation.at_ns))


def draw_adapter_changes(rng: random.Random, span_ns: int) -> tuple[Operation, ...]:
    """Draw the times at which operators load and unload an adapter."""
    actions: list[Action] = ["load", "unload"]
    times = sorted(rng.randrange(span_ns) for _ in range(rng.randint(1, 6)))
    return tuple(Operation(at_ns=at_ns, action=actions[n % 2]) for n, at_ns in enumerate(times))


def draw_replacements(rng: random.Random, span_ns: int) -> tuple[Operation, ...]:
    """Draw the times at which operators replace policies, one or several at once."""
    drawn = []
    for _ in range(rng.randint(1, 5)):
        paths = rng.sample(list(POLICIES), rng.randint(1, 3))
        policies: dict[str, PolicyTable] = {
            path: {"use": rng.choice(POLICIES[path])} for path in paths
        }
        drawn.append(Operation(at_ns=rng.randrange(span_ns), action="replace", policies=policies))
    return tuple(drawn)


async def operate(world: World, client: AsgiClient, operation: Operation) -> None:
    """Perform an action now, and check the response."""
    calls: list[tuple[str, str, Any]]
    if operation.action == "look":
        calls = [("GET", path, None) for path in LOOKS]
    elif operation.action == "clear":
        calls = [("POST", "/admin/clear", {})]
    elif operation.action == "load":
        calls = [("POST", "/admin/adapters", {"name": EXTRA, "path": EXTRA})]
    elif operation.action == "unload":
        calls = [("DELETE", f"/admin/adapters/{EXTRA}", None)]
    elif operation.action == "replace":
        calls = [("POST", "/admin/policies", operation.policies)]
    else:
        body = {"group": operation.group, "action": operation.action}
        calls = [("POST", "/admin/replicas", body)]
    for method, path, requested in calls:
        response = await client.request(method, path, json=requested)
        world.expect(
            response.status in UNDERSTOOD or (method, response.status) == ("DELETE", 404),
            f"{method} {path} {requested} was answered with {response.status}: {response.body!r}",
        )


SHUT_DOWN_S = 60.0
HELD_SHARE = 0.2
"""Share of requests with a grammar."""
HEAL_S = 120.0
"""Virtual seconds after the last fault within which everything must have ended."""


def small_config(**changes: Any) -> Config:
    """Return a configuration small enough that a few small requests exhaust everything, with short fault timeouts.

    Args:
        changes: As in `changed_config`.
    """
    config = Config(
        model=ModelConfig(path="simulated"),
        arena=ArenaConfig(pixel_bytes=16384, embedding_bytes=4096),
        encode=EncodeConfig(plugin=NAME, device="simulated"),
        generate=GenerateConfig(
            plugin=NAME,
            device="simulated",
            block_size=8,
            max_batch_tokens=64,
            chunk_tokens=24,
            slots=4,
            max_waiting=64,
            context_tokens=256,
            memory={"use": "pinned", "tokens": 400},
        ),
        deadlines=DeadlinesConfig(
            ready_s=5.0, step_s=3.0, heartbeat_s=0.5, rank_timeout_s=2.0, drain_s=2.0
        ),
    )
    return changed_config(config, **changes)


def changed_config(config: Config, **changes: Any) -> Config:
    """Return a configuration with other top-level values; a dict for a section changes some of its keys."""
    values = {}
    for name, value in changes.items():
        section = getattr(config, name)
        if isinstance(section, msgspec.Struct) and isinstance(value, dict):
            value = msgspec.structs.replace(section, **value)
        values[name] = value
    return msgspec.structs.replace(config, **values)


class SimEngine:
    """One engine on the running virtual loop; use it as `async with SimEngine(...) as engine`.

    Args:
        config: By default `small_config()`; its workers must be the simulated ones.
        seed: Seed of all random draws.
        faults: Planned faults; their times count from `origin_ns`.
        costs: Step durations.
        delays: Other durations.
        links: Properties of the links between leaders and ranks, without faults.
        host_links: Properties of the links to the hosts in `cluster.hosts`.
        origin_ns: Origin of workload and fault times; by default ten seconds from now, when the
            engine has started.
        choices_max: Maximum number of choices per request, for randomly drawn behaviours.
        allow_policy_failures: Whether policies may fail; by default, a policy failure fails the
            simulation.

    Raises:
        ConfigError: When a fault names an unknown host.

    Attributes:
        engine: The production engine.
        client: Client of the HTTP application.
        world: The simulated environment, with the list of violations.
        sessions: All requests sent through `send` and `run`.
        operations: All operator actions.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        seed: int = 0,
        faults: FaultPlan | None = None,
        costs: CostModel = QUICK,
        delays: Delays | None = None,
        links: LinkProfile | None = None,
        host_links: HostLinkProfile | None = None,
        origin_ns: int | None = None,
        choices_max: int = 1,
        allow_policy_failures: bool = False,
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "there is no virtual time on this loop"
        self.config = config or small_config()
        self.plan = faults or FaultPlan(seed=seed)
        self._choices_max = choices_max
        self._allow_policy_failures = allow_policy_failures
        if origin_ns is None:
            origin_ns = loop.now_ns() + ORIGIN_NS
        self.world = World(
            loop, seed, self.plan, costs=costs, delays=delays, links=links, origin_ns=origin_ns
        )
        self.observer: EngineObserver | None = None
        self.sessions: list[ClientSession] = []
        self.operations: list[Operation] = []
        self.was_shut_down = False
        self._tasks: list[asyncio.Task[None]] = []
        self._operating: list[asyncio.Task[None]] = []
        self._around = contextlib.ExitStack()
        self._look_due = False
        self.launcher = SimulatedCluster(self.world, self.config, host_links or HostLinkProfile())
        self._tasks_before = asyncio.all_tasks()
        environment = Environment(
            make_launcher=lambda _: self.launcher,
            make_grammar_checker=lambda _config, _info: SymbolicGrammars(),
            make_media=media_of(self.world),
            open_record=self._open_record,
            now_ns=loop.now_ns,
            make_queue_clock=lambda: lambda: 0,
            interrupts_policies=False,
        )
        self.engine = Engine(self.config, environment=environment, seed=seed)
        self.client = AsgiClient(create_app(self.engine, ApiSettings(tenant_header=TENANT_HEADER)))

    # --- lifecycle ---

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.stop()
        if kind is None:
            self.check_violations()

    async def start(self) -> None:
        """Start the engine and advance to the origin of plan times.

        Raises:
            CheckpointError, DeviceOutOfMemory, GroupLostError: As `Engine.start`.
        """
        self._around.enter_context(self.world.injector.armed())
        loop = self.world.loop
        await asyncio.sleep(1e-3)  # the kernel reads time 0 as "never"
        try:
            await self.engine.start()
        except BaseException:
            self._around.close()
            raise
        await self.sleep_until(0)
        for fault in self.plan.faults:
            if isinstance(fault, ReplicaRestart):
                self._operating.append(loop.create_task(self._restart(fault.at_ns)))
            elif isinstance(fault, Disconnect):
                loop.call_at_ns(self.world.origin_ns + fault.at_ns, self._look)

    async def stop(self) -> None:
        """Stop everything."""
        self._around.close()
        tasks = [*self._tasks, *self._operating]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.engine.stop()
        await self._end_hosts()
        left = [task for task in asyncio.all_tasks() - self._tasks_before if not task.done()]
        names = sorted(str(task.get_coro()) for task in left)
        self.world.expect(not left, f"tasks are left after the stop: {names}")

    async def _end_hosts(self) -> None:
        """Check that no rank outlives the engine longer than a host's silence timeout, and stop the hosts."""
        if self.launcher.machines:
            deadlines = self.config.deadlines
            await self.sleep_until(self.plan.end_ns)
            await asyncio.sleep(silence_s(deadlines) + deadlines.step_s)
        alive = sum(rank.alive for rank in self.launcher.ranks)
        self.world.expect(not alive, f"{alive} ranks outlive the engine")
        await self.launcher.stop_machines()

    async def shut_down(self) -> None:
        """Stop the production engine while clients wait, as a server does; every client must get an error.

        Raises:
            SimulationFailed: When a client gets none, or anything was violated before.
        """
        await self.engine.stop()
        self.was_shut_down = True
        await self._wait_for_ends(SHUT_DOWN_S)
        if self.observer is not None:
            check_ends(self)
        self.check_violations()

    async def _resume_groups(self) -> None:
        """Resume drained groups: all of them once every request has ended.

        Until then, only if every remaining group of a stage is drained: requests wait for that
        stage.
        """
        while True:
            rows = self.engine.groups()
            serving = {stage_of(row["name"]) for row in rows if row["state"] in ("up", "down")}
            if all(task.done() for task in self._tasks):
                serving.clear()
            for row in rows:
                drained = row["state"] == "draining" and stage_of(row["name"]) not in serving
                if drained and self.engine.state in ("ready", "degraded"):
                    self.engine.resume_group(row["name"])
            await asyncio.sleep(POLL_S)

    async def _wait_for_ends(self, within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await asyncio.gather(*self._tasks)
        except TimeoutError:
            kernel = self.observer.kernel if self.observer is not None else None
            for session in self.sessions:
                if not session.outcome:
                    where = session.phase(kernel) or "gone"
                    self.world.violate(f"{session}: no end within {within_s:g} s; it is in {where}")

    def _open_record(self, config: Config, kernel: Scheduler) -> EngineObserver:
        self.observer = EngineObserver(
            self.world,
            config,
            self.engine.info,
            kernel,
            allow_policy_failures=self._allow_policy_failures,
        )
        self.observer.on_event = self._note_event
        self.observer.on_accept = self._note_accept
        return self.observer

    # --- clients ---

    def send(
        self,
        arrival: Arrival,
        behaviour: ClientBehaviour | None = None,
        *,
        after: ClientSession | None = None,
    ) -> ClientSession:
        """Send a request now, or after another session has ended.

        Images and frames above the limit are scaled down, as by a server.

        Raises:
            ConfigError: When its adapter is not in `adapters.load`.
        """
        index, loaded = len(self.sessions), ["", *self.config.adapters.load]
        if arrival.adapter not in loaded:
            raise ConfigError(
                f"{arrival.request_id}: no adapter {arrival.adapter!r}. Remedy: add it to adapters.load"
            )
        arrival = arrival.scaled_down(self.engine.info.item_tokens_max)
        session = ClientSession(
            self.world, index, arrival, behaviour or self._draw_behaviour(index)
        )
        session.adapter = loaded.index(arrival.adapter)
        self.sessions.append(session)
        self._tasks.append(self.world.loop.create_task(self._run_session(session, after)))
        return session

    async def _run_session(self, session: ClientSession, after: ClientSession | None) -> None:
        if after is not None:
            await after.done.wait()
            due_ns = after.ended_ns + session.arrival.think_ns
            await asyncio.sleep(max(due_ns - self.world.loop.now_ns(), 0) / 1e9)
        await session.send_request(self.engine, self.client)

    async def run(self, workload: Iterable[Arrival]) -> list[ClientSession]:
        """Send requests at their arrival times; return after the last one is sent.

        A conversation turn is sent after the previous turn has ended.
        """
        sessions: list[ClientSession] = []
        turns: dict[str, ClientSession] = {}
        for arrival in workload:
            await self.sleep_until(arrival.at_ns)
            before = turns.get(arrival.conversation) if arrival.conversation else None
            session = self.send(arrival, after=before)
            if arrival.conversation:
                turns[arrival.conversation] = session
            sessions.append(session)
        return sessions

    def operate(self, operation: Operation) -> None:
        """Perform an operator action at its time."""
        self.operations.append(operation)
        self._operating.append(self.world.loop.create_task(self._operate(operation)))

    async def _operate(self, operation: Operation) -> None:
        await self.sleep_until(operation.at_ns)
        await operate(self.world, self.client, operation)

    async def sleep_until(self, at_ns: int) -> None:
        """Sleep until a time, counted from `origin_ns`."""
        left_ns = self.world.origin_ns + at_ns - self.world.loop.now_ns()
        await asyncio.sleep(max(left_ns, 0) / 1e9)

    def _draw_behaviour(self, index: int) -> ClientBehaviour:
        rng = self.world.generator(f"manner {index}")
        http = rng.random() < 0.5
        return ClientBehaviour(
            http=http,
            stream=rng.random() < 0.7,
            slow_upload=http and rng.random() < 0.2,
            remote=rng.random() < 0.3,
            stop_token_ids=tuple(_draw_stops(rng)),
            stop=tuple(f" {one}" for one in _draw_stops(rng)),
            choices=tuple(_draw_choices(rng)) if rng.random() < HELD_SHARE else (),
            answers=rng.randint(1, self._choices_max),
        )

    async def heal(self) -> None:
        """Wait until all faults are over and every request has ended; then check that no resource is held.

        Raises:
            SimulationFailed: When requests do not end, something is held, or anything was violated
                before.
        """
        await self.sleep_until(self.plan.end_ns)
        await asyncio.gather(*self._operating)
        resuming = self.world.loop.create_task(self._resume_groups())
        try:
            await self._wait_for_ends(HEAL_S)
            await check_healed(self)
        finally:
            resuming.cancel()
        self.check_violations()

    def check_violations(self) -> None:
        """Raise if an invariant was violated.

        Raises:
            SimulationFailed: With all violations.
        """
        if self.world.violations:
            raise SimulationFailed("\n".join(self.world.violations_and_hints()))

    @property
    def digest(self) -> str:
        """Digest of all kernel events and commands, with their times."""
        return self.observer.digest if self.observer is not None else ""

    @property
    def groups(self) -> list[str]:
        """The names of all groups."""
        return groups_of(self.config)

    # --- external faults ---

    def _note_accept(self, number: int, request: Request) -> None:
        index = (request.sampling.seed or 0) - FIRST_SEED
        if 0 <= index < len(self.sessions):
            self.sessions[index].accepted(number, request)

    def _note_event(self) -> None:
        if not self._look_due and self.world.injector.of(Disconnect):
            self._look_due = True
            self.world.loop.call_soon(self._look)

    def _look(self) -> None:
        """Disconnect clients that are in the phase of a due `Disconnect` fault."""
        self._look_due = False
        kernel = self.observer.kernel if self.observer is not None else None
        phases = {session.phase(kernel): session for session in reversed(self.sessions)}
        while True:
            fault = self.world.injector.take_fault(Disconnect, such=lambda one: one.phase in phases)
            if fault is None:
                return
            phases.pop(fault.phase).leave()

    async def _restart(self, at_ns: int) -> None:
        await self.sleep_until(at_ns)
        fault = self.world.injector.take_fault(ReplicaRestart)
        if fault is not None:
            restart = Operation(at_ns=at_ns, action="restart", group=fault.group)
            await operate(self.world, self.client, restart)


def _draw_stops(rng: random.Random) -> list[int]:
    """Draw stop tokens; most requests have none."""
    some = range(FIRST_TOKEN, FIRST_TOKEN + TOKENS)
    return rng.sample(some, rng.randint(1, 8)) if rng.random() < 0.25 else []


def _draw_choices(rng: random.Random) -> list[tuple[int, ...]]:
    """Draw choices for the output: they share a prefix, differ at one token, and none is a prefix of another."""
    some = range(FIRST_TOKEN, FIRST_TOKEN + TOKENS)
    head = tuple(rng.choices(some, k=rng.randint(0, 4)))
    return [
        (*head, token, *rng.choices(some, k=rng.randint(0, 12)))
        for token in rng.sample(some, rng.randint(1, 4))
    ]


def groups_of(config: Config) -> list[str]:
    """Return the names of all groups of a configuration."""
    return [
        *group_names("encode", config.encode.replicas),
        *group_names("generate", config.generate.replicas),
    ]
