"""A simulated engine: `vsched.engine.Engine` and the HTTP application over it, with everything around them simulated.

Kernel, shell, worker groups, leaders, decision logs, ranks up to their workers, sizing of KV caches, supervisor,
administration, streams, media pipeline and HTTP are the production code.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable
from typing import Any, Self

import msgspec

from vsched.aio.environment import Environment
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
from vsched.engine import Engine
from vsched.kernel import Scheduler
from vsched.sim.cluster import run_checks
from vsched.sim.cluster.client_sessions import ClientBehaviour, ClientSession
from vsched.sim.cluster.machines import SimulatedCluster
from vsched.sim.cluster.media import media_of
from vsched.sim.cluster.observer import EngineObserver
from vsched.sim.cluster.operators import Operation, operate
from vsched.sim.cluster.plugin import NAME
from vsched.sim.faults.plan import Disconnect, FaultPlan, GroupWideFault, ReplicaRestart
from vsched.sim.invariants import SimulationFailed
from vsched.sim.loop.virtual_loop import VirtualLoop
from vsched.sim.network.asgi_client import AsgiClient
from vsched.sim.network.channel import LinkProfile
from vsched.sim.network.lane import HostLinkProfile
from vsched.sim.ranks.symbolic_grammars import SymbolicChecker
from vsched.sim.ranks.symbolic_model import FIRST_TOKEN, TOKENS
from vsched.sim.workload.requests import Arrival
from vsched.sim.world import ORIGIN_NS, QUICK, Delays, StepCosts, World
from vsched.types import Request, group_names, stage_of

REMEDY = "a whole engine loses a group through its ranks. Remedy: name a fault of a rank, such as worker_crash or hang"
SHUT_DOWN_S = 60.0
HELD_SHARE = 0.2
"""How many answers are held to a grammar."""
HEAL_S = 120.0
"""Virtual seconds within which everything must have ended once the last fault is over."""


def small_config(**changes: Any) -> Config:
    """Return a configuration in which a few small requests make everything scarce, and faults are noticed soon.

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
        seed: Of everything that is drawn.
        faults: What goes wrong, at times that count from when the engine has started.
        costs: How long steps take.
        delays: How long everything else takes.
        links: What the links between leaders and ranks are like without faults.
        host_links: What the links to other hosts are like, where `cluster.hosts` has any.
        origin_ns: The time that workloads and faults count from; by default ten seconds from now, when the engine has
            started.
        answers_max: The most answers that a request asks for, where its manner is drawn.
        allow_policy_failures: Whether policies may fail; by default, a policy failure fails the simulation.

    Raises:
        ConfigError: When a fault is of a kind that only groups as a whole have, or of a host that there is not.

    Attributes:
        engine: The production engine.
        client: Of the HTTP application.
        world: What it stands on, and the list of violations.
        sessions: All requests that were sent through `send` and `run`.
        operations: All that operators were told to do.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        seed: int = 0,
        faults: FaultPlan | None = None,
        costs: StepCosts = QUICK,
        delays: Delays | None = None,
        links: LinkProfile | None = None,
        host_links: HostLinkProfile | None = None,
        origin_ns: int | None = None,
        answers_max: int = 1,
        allow_policy_failures: bool = False,
    ) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "there is no virtual time on this loop"
        self.config = config or small_config()
        self.plan = faults or FaultPlan(seed=seed)
        self._answers_max = answers_max
        for fault in self.plan.faults:
            if isinstance(fault, GroupWideFault):
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
        self.engine = Engine(self.config, environment=environment)
        self.client = AsgiClient(create_app(self.engine, ApiSettings()))

    # --- life ---

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.stop()
        if kind is None:
            self.check_violations()

    async def start(self) -> None:
        """Start the engine, and let the time come from which plans count.

        Raises:
            CheckpointError, DeviceOutOfMemory, GroupLostError: As `Engine.start`.
        """
        self._around.enter_context(self.world.injector.armed())
        loop = self.world.loop
        await asyncio.sleep(1e-3)  # a time of 0 means never to the kernel
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
        """See that no rank outlives the engine for longer than a host can be in doubt, and end the hosts."""
        if self.launcher.machines:
            deadlines = self.config.deadlines
            await self.sleep_until(self.plan.end_ns)
            await asyncio.sleep(run_checks.silence_s(deadlines) + deadlines.step_s)
        alive = sum(rank.alive for rank in self.launcher.ranks)
        self.world.expect(not alive, f"{alive} ranks outlive the engine")
        await self.launcher.end()

    async def shut_down(self) -> None:
        """Stop the production engine, as a server does, while clients wait; each must hear of it.

        Raises:
            SimulationFailed: When one does not, or anything was violated before.
        """
        await self.engine.stop()
        self.was_shut_down = True
        await self._wait_for_ends(SHUT_DOWN_S)
        if self.observer is not None:
            run_checks.check_ends(self)
        self.check_violations()

    async def _resume_groups(self) -> None:
        """Give drained groups work again: all of them when every request has ended.

        Before, only where operators have drained all that are left of a stage: requests wait for that.
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
        """Send a request now, or when another has ended."""
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
        """Send requests when their time has come; return once it has come for the last.

        A turn of a conversation is sent when the turn before has ended.
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
        """Have an operator do something when its time has come."""
        self.operations.append(operation)
        self._operating.append(self.world.loop.create_task(self._operate(operation)))

    async def _operate(self, operation: Operation) -> None:
        await self.sleep_until(operation.at_ns)
        await operate(self.world, self.client, operation)

    async def sleep_until(self, at_ns: int) -> None:
        """Sleep until a time, counted as plans and workloads do."""
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
            answers=rng.randint(1, self._answers_max),
            adapter=index % (1 + len(self.config.adapters.load)),
        )

    async def heal(self, *, within_s: float = HEAL_S) -> None:
        """Wait until all faults are over and every request has ended; then see that nothing is left behind.

        Raises:
            SimulationFailed: When requests do not end, something is held, or anything was violated before.
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
        """Raise when something happened that must never happen.

        Raises:
            SimulationFailed: With all of it.
        """
        if self.world.violations:
            raise SimulationFailed("\n".join(self.world.violations_and_hints()))

    @property
    def digest(self) -> str:
        """Over all that the kernel heard and decided, and when."""
        return self.observer.digest if self.observer is not None else ""

    @property
    def groups(self) -> list[str]:
        """The names of all groups."""
        return groups_of(self.config)

    # --- faults that strike from outside ---

    def _note_accept(self, number: int, request: Request) -> None:
        index = request.sampling.seed  # sessions have it for this
        if 0 <= index < len(self.sessions):
            self.sessions[index].accepted(number, request)

    def _note_event(self) -> None:
        if not self._look_due and self.world.injector.of(Disconnect):
            self._look_due = True
            self.world.loop.call_soon(self._look)

    def _look(self) -> None:
        """Have clients go away that are where a fault wants one to be."""
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
    """Draw tokens that may end an answer; most requests have none."""
    some = range(FIRST_TOKEN, FIRST_TOKEN + TOKENS)
    return rng.sample(some, rng.randint(1, 8)) if rng.random() < 0.25 else []


def _draw_choices(rng: random.Random) -> list[tuple[int, ...]]:
    """Draw answers of which one must come: they begin alike, part at one token, and none begins another."""
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
