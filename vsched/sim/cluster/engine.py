"""A simulated engine: `vsched.engine.Engine` with its HTTP application, on a simulated environment.

Kernel, shell, worker groups, leaders, decision logs, ranks up to their workers, KV cache sizing,
supervisor, administration, streams, media pipeline and HTTP are production code.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable
from typing import Any, Self

import msgspec

from vsched.api.app import create_app
from vsched.api.contract import ApiSettings
from vsched.config import (
    ArenaConfig,
    Config,
    DeadlinesConfig,
    EncodeConfig,
    GenerateConfig,
    ModelConfig,
)
from vsched.engine import Engine, Environment
from vsched.kernel import Scheduler
from vsched.sim.cluster import run_checks
from vsched.sim.cluster.client_sessions import ClientBehaviour, ClientSession
from vsched.sim.cluster.machines import SimulatedCluster
from vsched.sim.cluster.media import media_of
from vsched.sim.cluster.observer import EngineObserver
from vsched.sim.cluster.operators import Operation, operate
from vsched.sim.cluster.plugin import NAME
from vsched.sim.cost.model import CostModel
from vsched.sim.faults.plan import Disconnect, FaultPlan, GroupOutage, ReplicaRestart
from vsched.sim.invariants import SimulationFailed
from vsched.sim.loop.virtual_loop import VirtualLoop
from vsched.sim.network.asgi_client import AsgiClient
from vsched.sim.network.channel import LinkProfile
from vsched.sim.network.lane import HostLinkProfile
from vsched.sim.ranks.symbolic_grammars import SymbolicChecker
from vsched.sim.ranks.symbolic_model import FIRST_TOKEN, TOKENS
from vsched.sim.workload.requests import Arrival
from vsched.sim.world import ORIGIN_NS, QUICK, Delays, World
from vsched.types import Request, group_names, stage_of

REMEDY = "a whole engine loses a group through its ranks. Remedy: name a fault of a rank, such as worker_crash or hang"
SHUT_DOWN_S = 60.0
HELD_SHARE = 0.2
"""Share of requests with a grammar."""
HEAL_S = 120.0
"""Virtual seconds after the last fault within which everything must have ended."""


def small_config(**changes: Any) -> Config:
    """Return a configuration small enough that a few small requests exhaust everything, with short fault timeouts.

    Args:
        changes: Sections to replace, by name.
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
    return msgspec.structs.replace(config, **changes)


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
        ConfigError: When a fault applies only to whole groups, or names an unknown host.

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
        for fault in self.plan.faults:
            if isinstance(fault, GroupOutage):
                raise fault.refused(REMEDY)
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
            make_grammar_checker=lambda _config, _info: SymbolicChecker(),
            make_media=media_of(self.world),
            open_record=self._open_record,
            now_ns=loop.now_ns,
            make_queue_clock=lambda: lambda: 0,
        )
        self.engine = Engine(self.config, environment=environment, seed=seed)
        self.client = AsgiClient(create_app(self.engine, ApiSettings()))

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
            await asyncio.sleep(run_checks.silence_s(deadlines) + deadlines.step_s)
        alive = sum(rank.alive for rank in self.launcher.ranks)
        self.world.expect(not alive, f"{alive} ranks outlive the engine")
        await self.launcher.end()

    async def shut_down(self) -> None:
        """Stop the production engine while clients wait, as a server does; every client must get an error.

        Raises:
            SimulationFailed: When a client gets none, or anything was violated before.
        """
        await self.engine.stop()
        self.was_shut_down = True
        await self._wait_for_ends(SHUT_DOWN_S)
        if self.observer is not None:
            run_checks.check_ends(self)
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
            await asyncio.sleep(run_checks.POLL_S)

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
        """Send a request now, or after another session has ended."""
        index = len(self.sessions)
        session = ClientSession(
            self.world, index, arrival, behaviour or self._draw_behaviour(index)
        )
        self.sessions.append(session)
        self._tasks.append(self.world.loop.create_task(self._run_session(session, after)))
        return session

    async def _run_session(self, session: ClientSession, after: ClientSession | None) -> None:
        if after is not None:
            await after.done.wait()
            await asyncio.sleep(session.arrival.think_ns / 1e9)
        await session.run(self.engine, self.client)

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
            adapter=index % (1 + len(self.config.adapters.load)),
        )

    async def heal(self, *, within_s: float = HEAL_S) -> None:
        """Wait until all faults are over and every request has ended; then check that no resource is held.

        Raises:
            SimulationFailed: When requests do not end, something is held, or anything was violated
                before.
        """
        await self.sleep_until(self.plan.end_ns)
        await asyncio.gather(*self._operating)
        resuming = self.world.loop.create_task(self._resume_groups())
        try:
            await self._wait_for_ends(within_s)
            await run_checks.check_healed(self)
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
        index = request.sampling.seed  # sessions use their index as seed
        if index is not None and 0 <= index < len(self.sessions):
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
            fault = self.world.injector.take(Disconnect, such=lambda one: one.phase in phases)
            if fault is None:
                return
            phases.pop(fault.phase).leave()

    async def _restart(self, at_ns: int) -> None:
        await self.sleep_until(at_ns)
        fault = self.world.injector.take(ReplicaRestart)
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
