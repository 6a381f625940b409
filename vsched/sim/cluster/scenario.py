"""Scenarios drawn from a seed: a configuration, overlapping requests, and faults; then everything must recover.

Scenarios under pressure: resources are scarce and busy when faults and operator actions occur.

Preemptions and group losses are rare, so a plain scenario hardly ever has both at once. Here KV
cache, embeddings and slots are as small as possible, all requests arrive together, and faults are
drawn in patterns known to interact: repeated losses, failed starts, and disconnects and operator
actions in between.

The swarm: runs many scenarios drawn from seeds, each with its own faults, until one breaks an invariant.

Each scenario has a random subset of fault kinds, and its own engine and requests. A failure is
reported with its seed, its minimized fault plan as JSON, and the command that reproduces it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from vsched.config import Config
from vsched.config.checks import check_cluster, check_combinations
from vsched.config.policies import policy_table
from vsched.config.sections import (
    OWN_HOST,
    AdaptersConfig,
    ClusterConfig,
    PolicyTable,
)
from vsched.plugins import resolve_several
from vsched.policy import SEVERAL
from vsched.probes import PROBES, observed
from vsched.sim.cluster.engine import (
    Action,
    Operation,
    SimEngine,
    changed_config,
    draw_adapter_changes,
    draw_operations,
    draw_replacements,
    groups_of,
    small_config,
)
from vsched.sim.cost.calibration import slower
from vsched.sim.faults import (
    FAULTS_MAX,
    HOST_KINDS,
    KINDS,
    AnyFault,
    Disconnect,
    FaultPlan,
    Hang,
    MissedDecision,
    OutOfMemory,
    WorkerCrash,
    random_plan,
)
from vsched.sim.invariants import SimulationFailed
from vsched.sim.loop import VirtualLoop
from vsched.sim.network.links import HostLinkProfile, LinkProfile
from vsched.sim.ranks.plugin import SEEN_TOKENS_MAX, SEES_IMAGES, plugin
from vsched.sim.ranks.symbolic_model import DRAFT
from vsched.sim.workload.requests import Arrival, Image, PromptPart, Reply, Text, Video
from vsched.sim.world import QUICK
from vsched.types import stage_of

PRESSED_SPAN_NS = 1_500_000_000
MILLISECOND_NS = 1_000_000
BACK_MS = 205
"""Approximate time from a group loss to KV cache sizing; see `vsched.sim.world.Delays`."""
STARTS = 4
"""Number of consecutive failed starts after which a group is retired."""


def press_config(rng: random.Random, config: Config) -> Config:
    """Return a configuration with minimal resources."""
    return changed_config(
        config,
        generate={
            "slots": rng.choice([3, 6, 8]),
            "chunk_tokens": rng.choice([8, 24]),
            "memory": {"use": "pinned", "tokens": rng.choice([256, 264, 288])},
        },
        encode={
            "admission": rng.choice(
                [{"use": "token-budget", "max_items": 8}, {"use": "priority"}, {"use": "fifo"}]
            )
        },
        arena={"pixel_bytes": 65536, "embedding_bytes": 1024 * rng.choice([2, 3, 6])},
    )


def press_arrivals(rng: random.Random, arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
    """Return requests with long outputs that arrive almost together."""
    gap_ns = rng.choice([0, 5, 50]) * MILLISECOND_NS
    return tuple(
        msgspec.structs.replace(arrival, at_ns=index * gap_ns, output_tokens=rng.randint(1, 64))
        for index, arrival in enumerate(arrivals)
    )


def draw_patterns(
    rng: random.Random, groups: Sequence[str]
) -> tuple[FaultPlan, tuple[Operation, ...]]:
    """Draw faults and operator actions."""
    drawn = _Patterns(rng)
    generators = [name for name in groups if stage_of(name) == "generate"]
    for _ in range(rng.randint(1, 4)):
        at_ns = rng.randrange(PRESSED_SPAN_NS // MILLISECOND_NS) * MILLISECOND_NS
        pattern = rng.choice(PATTERNS)
        pattern(drawn, at_ns, rng.choice([*groups, *generators]))
    faults = sorted(drawn.faults, key=lambda fault: fault.at_ns)
    plan = FaultPlan(seed=rng.getrandbits(32), faults=tuple(faults))
    return plan, tuple(sorted(drawn.operations, key=lambda operation: operation.at_ns))


class _Patterns:
    """Faults and operator actions drawn so far; each method adds a pattern of them for a group."""

    def __init__(self, rng: random.Random) -> None:
        self.faults: list[AnyFault] = []
        self.operations: list[Operation] = []
        self._rng = rng

    def losses(self, at_ns: int, group: str) -> None:
        """Lose a group several times; clients disconnect in between."""
        rng = self._rng
        for _ in range(rng.randint(1, 3)):
            moment = rng.choice(("before_reply", "after_reply"))
            self.faults.append(WorkerCrash(at_ns=at_ns, group=group, moment=moment))  # type: ignore[arg-type]
            at_ns += rng.randint(BACK_MS, 3 * BACK_MS) * MILLISECOND_NS
            if rng.random() < 0.5:
                phase = rng.choice(("wait", "prefill", "decode"))
                self.faults.append(Disconnect(at_ns=at_ns, phase=phase))  # type: ignore[arg-type]

    def no_return(self, at_ns: int, group: str) -> None:
        """Lose a group that fails to restart."""
        self.faults.append(WorkerCrash(at_ns=at_ns, group=group))
        self.faults += [OutOfMemory(at_ns=at_ns, group=group, during="load")] * STARTS

    def failed_batches(self, at_ns: int, group: str) -> None:
        """Make steps run out of memory, mostly encoder steps."""
        group = group.replace("generate", "encode") if self._rng.random() < 0.7 else group
        self.faults += [
            OutOfMemory(at_ns=at_ns + 5 * index * MILLISECOND_NS, group=group)
            for index in range(self._rng.randint(1, 3))
        ]

    def cleared(self, at_ns: int, group: str) -> None:
        """Lose a group, and clear all requests at about the time it returns."""
        self.faults.append(WorkerCrash(at_ns=at_ns, group=group))
        later_ms = self._rng.randint(BACK_MS - 5, BACK_MS + 40)
        self._operate(at_ns + later_ms * MILLISECOND_NS, "clear")

    def left(self, at_ns: int, _: str) -> None:
        """Disconnect clients one after another, or clear all requests, under full load."""
        if self._rng.random() < 0.5:
            self._operate(at_ns, "clear")
        else:
            self.faults.append(Disconnect(at_ns=at_ns, phase="decode"))
            self.faults.append(Disconnect(at_ns=at_ns, phase="wait"))

    def administered(self, at_ns: int, group: str) -> None:
        """Drain a group, then lose, resume or restart it before it is drained."""
        self._operate(at_ns, "drain", group)
        at_ns += self._rng.randint(5, 300) * MILLISECOND_NS
        if self._rng.random() < 0.4:
            self.faults.append(WorkerCrash(at_ns=at_ns, group=group))
        self._operate(at_ns, self._rng.choice(("resume", "restart")), group)

    def _operate(self, at_ns: int, action: Action, group: str = "") -> None:
        self.operations.append(Operation(at_ns=at_ns, action=action, group=group))


PATTERNS = (
    _Patterns.losses,
    _Patterns.losses,
    _Patterns.no_return,
    _Patterns.failed_batches,
    _Patterns.cleared,
    _Patterns.left,
    _Patterns.administered,
    _Patterns.administered,
)


SPAN_NS = 3_000_000_000
"""Span in which faults start, and their maximum duration."""
REQUESTS = 8
DEADLY = (WorkerCrash, OutOfMemory, Hang, MissedDecision)
"""Faults that take groups down; many of them lead to retired groups."""
FIRST_PRESSED = 1000
"""From this seed on, every other scenario is under pressure. Earlier seeds keep their meaning."""
IMAGES = 6
"""Number of images that requests share, and of shared text prefixes."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run depends on: equal scenarios give equal runs.

    Attributes:
        slower: Factor on step durations.
        host_links: Properties of the links to other hosts.
        choices_max: Maximum number of choices per request.
        shut_down_ns: When the server is stopped while clients wait; by default it runs until
            everything has recovered.
    """

    seed: int
    config: Config
    arrivals: tuple[Arrival, ...]
    operations: tuple[Operation, ...]
    plan: FaultPlan
    links: LinkProfile
    slower: float
    host_links: HostLinkProfile = HostLinkProfile()
    choices_max: int = 1
    shut_down_ns: int | None = None

    def with_policies(self, tables: Mapping[str, PolicyTable]) -> Scenario:
        """Return the scenario with these policy tables, by path, instead of the drawn ones.

        The tables that the table `policy` stands for are reset to their defaults. A drafting policy gets a draft model,
        without which one that asks for it could not be served.
        """
        config, reset = self.config, {}
        if SEVERAL in tables:
            reset = {
                path: policy_table(Config(), path) for path in resolve_several(tables[SEVERAL])[1]
            }
        for path, table in {**reset, **tables}.items():
            section, _, name = path.rpartition(".")
            change: dict[str, Any] = {section: {name: table}} if section else {name: table}
            config = changed_config(config, **change)
        if "generate.drafting" in {*tables, *reset} and not config.generate.draft_model:
            config = changed_config(config, generate={"draft_model": f"{DRAFT} 0.7"})
        return msgspec.structs.replace(self, config=config)

    def with_operations(self, more: Iterable[Operation]) -> Scenario:
        """Return the scenario with further operator actions."""
        operations = sorted((*self.operations, *more), key=lambda each: each.at_ns)
        return msgspec.structs.replace(self, operations=tuple(operations))

    def with_config(self, **changes: Any) -> Scenario:
        """Return the scenario with other values in its configuration; see `changed_config`."""
        return msgspec.structs.replace(self, config=changed_config(self.config, **changes))

    def with_faults(self, plan: FaultPlan) -> Scenario:
        """Return the scenario with another fault plan."""
        return msgspec.structs.replace(self, plan=plan)


class ScenarioReport(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a scenario.

    Attributes:
        violations: Violated invariants; empty if the scenario passed.
        digest: Digest of all kernel events and commands, with their times.
        struck: Number of faults that had an effect.
        probes: Number of hits of each probe that was reached; see `vsched.probes`.
    """

    violations: tuple[str, ...] = ()
    digest: str = ""
    events: int = 0
    outcomes: dict[str, int] = {}
    losses: int = 0
    struck: int = 0
    probes: dict[str, int] = {}
    virtual_s: float = 0.0


def draw_scenario(seed: int) -> Scenario:
    """Draw a scenario."""
    pressed = seed >= FIRST_PRESSED and seed % 2
    drawn = draw_pressed(seed) if pressed else _draw_plain(seed)
    if seed % 10 == 7:
        # Chosen by the seed rather than a draw, so that the scenarios of other models do not
        # change.
        # The minimum that suffices: an image waits whenever another prompt takes part of the step.
        room = SEEN_TOKENS_MAX + drawn.config.generate.slots
        return drawn.with_config(model={"path": SEES_IMAGES}, generate={"max_batch_tokens": room})
    if seed % 10 == 2:
        rng = random.Random(f"policies {seed}")  # noqa: S311
        return drawn.with_operations(draw_replacements(rng, SPAN_NS))
    if seed % 10 == 3:
        return msgspec.structs.replace(drawn, choices_max=3)
    change = FEATURES.get(seed % 10)
    return drawn if change is None else change(drawn)


def _with_videos(drawn: Scenario) -> Scenario:
    """Replace some images by videos; of the same video, requests show more or less."""
    rng = random.Random(f"videos {drawn.seed}")  # noqa: S311

    def video(part: PromptPart) -> PromptPart:
        if not isinstance(part, Image) or rng.random() < 0.3:
            return part
        tokens = 1 + part.tokens // 4
        return Video(part.key, rng.randint(1, 5), tokens)

    arrivals = [
        msgspec.structs.replace(one, prompt=tuple(map(video, one.prompt))) for one in drawn.arrivals
    ]
    return msgspec.structs.replace(drawn, arrivals=tuple(arrivals))


def _with_hosts(drawn: Scenario) -> Scenario:
    """Place replicas on other hosts, and make hosts and their links fail."""
    rng = random.Random(f"hosts {drawn.seed}")  # noqa: S311
    lists = [["far"], ["far", "farther"], ["farther", "far"], [OWN_HOST, "far"], [OWN_HOST]]
    together = drawn.config.placement == "together"
    cluster = ClusterConfig(
        hosts={"far": "tcp://10.0.0.2:7700", "farther": "tcp://10.0.0.3:7700"},
        key_file="simulated",
        encode=[] if together else rng.choice(lists),
        generate=rng.choice(lists[:4]),
        connect_s=rng.choice([1.0, 10.0]),
    )
    check_cluster(cluster, together=together, adapters=0)
    more = random_plan(rng, (), SPAN_NS, kinds=HOST_KINDS, faults_max=4, hosts=tuple(cluster.hosts))
    faults = sorted((*drawn.plan.faults, *more.faults), key=lambda fault: fault.at_ns)
    return msgspec.structs.replace(
        drawn.with_config(cluster=cluster),
        plan=msgspec.structs.replace(drawn.plan, faults=tuple(faults)),
        host_links=HostLinkProfile(
            latency_ns=rng.choice([50_000, 1_000_000, 20_000_000]),
            jitter_ns=rng.choice([0, 0, 1_000_000]),
            bytes_per_s=rng.choice([300e3, 2e6, 125e6]),
            window_bytes=rng.choice([1024, 4096, 4 << 20]),
        ),
    )


def _with_drafts(drawn: Scenario) -> Scenario:
    """Draft with an unreliable draft model or prompt lookup; sometimes with swapping."""
    rng = random.Random(f"drafts {drawn.seed}")  # noqa: S311
    ngram = rng.choice([0, 0, 1])
    drafting = {
        "use": "draft-model",
        "tokens": rng.choice([1, 3, 8]),
        "steps": rng.choice([1, 4]),
        "pause_steps": rng.choice([1, 5]),
        "gain_min": rng.choice([0.0, 1.0]),
        "speedup_min": 0.0,
        "ngram": ngram,
        "running_max": 64,
    }
    draft_model = f"{DRAFT} {rng.choice([0.1, 0.7, 1.0])}"
    drafts = drawn.with_config(generate={"draft_model": draft_model, "drafting": drafting})
    return _with_swapping(drafts) if rng.random() < 0.3 else drafts


def _with_swapping(drawn: Scenario) -> Scenario:
    """Swap out preempted requests, with space for all, some, or hardly any of them."""
    generate, info = drawn.config.generate, plugin.inspect("", dtype="", item_tokens_max=0)
    places = random.Random(f"swap {drawn.seed}").choice([3, 12, 200])  # noqa: S311
    swap = {
        "swap_memory": places * generate.block_size * info.kv_bytes_per_token,
        "preemption": {**generate.preemption, "mode": "swap"},
    }
    return drawn.with_config(generate=swap)


def _with_adapters(drawn: Scenario) -> Scenario:
    """Make requests use one of two adapters or none, while operators load and unload a third."""
    names = ("", "adapter-1", "adapter-2")
    adapters = AdaptersConfig(
        count_max=3,
        load=dict.fromkeys(names[1:], "at start"),
        directory="/simulated/adapters",
        load_s=10.0,
    )
    rng = random.Random(f"adapters {drawn.seed}")  # noqa: S311
    changes = draw_adapter_changes(rng, SPAN_NS)
    arrivals = (
        msgspec.structs.replace(one, adapter=names[index % len(names)])
        for index, one in enumerate(drawn.arrivals)
    )
    drawn = msgspec.structs.replace(drawn, arrivals=tuple(arrivals))
    return drawn.with_config(adapters=adapters).with_operations(changes)


FEATURES: dict[int, Callable[[Scenario], Scenario]] = {
    1: _with_swapping,
    4: _with_hosts,
    5: _with_drafts,
    6: _with_videos,
    8: _with_hosts,
    9: _with_adapters,
}
"""Changes of scenarios, by the last digit of their seeds."""


def _draw_plain(seed: int) -> Scenario:
    rng = random.Random(f"scenario {seed}")  # noqa: S311
    config = draw_config(rng)
    kinds, faults_max = rng.choice([(KINDS, FAULTS_MAX)] * 4 + [(DEADLY, 2 * FAULTS_MAX)])
    return Scenario(
        seed=seed,
        config=config,
        arrivals=draw_arrivals(rng, REQUESTS),
        operations=draw_operations(rng, groups_of(config), SPAN_NS),
        plan=random_plan(
            rng,
            groups_of(config),
            SPAN_NS,
            ranks=config.generate.tensor_parallel,
            kinds=kinds,
            faults_max=faults_max,
        ),
        links=LinkProfile(jitter_ns=rng.choice([0, 0, 100_000, 2_000_000])),
        slower=rng.choice([1.0, 4.0, 16.0]),
        shut_down_ns=rng.randrange(SPAN_NS) if rng.random() < 0.1 else None,
    )


def draw_pressed(seed: int) -> Scenario:
    """Draw a scenario under pressure; see `vsched.sim.cluster.scenario`."""
    rng = random.Random(f"pressure {seed}")  # noqa: S311
    config = press_config(rng, draw_config(rng))
    plan, operations = draw_patterns(rng, groups_of(config))
    return Scenario(
        seed=seed,
        config=config,
        arrivals=press_arrivals(rng, draw_arrivals(rng, 2 * REQUESTS)),
        operations=operations,
        plan=plan,
        links=LinkProfile(jitter_ns=rng.choice([0, 100_000, 2_000_000])),
        slower=rng.choice([1.0, 4.0]),
    )


LOOK_AHEADS: tuple[dict[str, int], ...] = (
    {},
    {},
    {"look_ahead_chunks": 100},
    {"look_ahead_chunks": 1},
)


def draw_config(rng: random.Random) -> Config:
    """Draw a small engine: replicas, ranks, policies, and scarce resources."""
    ranks = rng.choice([1, 1, 1, 2])
    encoders, generators = rng.choice([(1, 1), (1, 1), (1, 2), (2, 2), (2, 1)])
    together = encoders == generators and rng.random() < 0.3
    generate: dict[str, Any] = {
        "replicas": generators,
        "tensor_parallel": ranks,
        "slots": rng.choice([1, 2, 4, 6]),
        "chunk_tokens": rng.choice([8, 24, 60]),
        "prefix_cache": rng.random() < 0.8,
        "step_target_ms": rng.choice([0.0, 5.0, 100.0]),
        "admission": {"use": rng.choice(["fifo", "fifo", "priority", "shortest-first"])},
        "preemption": {"use": rng.choice(["youngest", "cheapest"])},
        "memory": {"use": "pinned", "tokens": rng.choice([256, 320, 600])},
        "step_target_ratio": rng.choice([1.5, 8.0]),
    }
    if rng.random() < 0.2:
        generate["memory"] = {"use": "auto-profile"}
    config = small_config(
        placement="together" if together else "separate",
        arena={
            "pixel_bytes": rng.choice([8192, 16384]),
            "embedding_bytes": 1024 * rng.choice([2, 4, 16]),
        },
        encode={
            "replicas": encoders,
            "tensor_parallel": ranks,
            "encoding": {"use": "chunk-aware", **rng.choice(LOOK_AHEADS)},
            "admission": {"use": "token-budget", "max_items": rng.choice([1, 4, 8])},
        },
        generate=generate,
        routing={"use": rng.choice(["least-loaded", "round-robin", "image-affinity"])},
        deadlines={"waiting_s": rng.choice([0.0, 0.0, 0.0, 2.0])},
    )
    check_combinations(config)
    return config


def draw_arrivals(rng: random.Random, requests: int) -> tuple[Arrival, ...]:
    """Draw requests that share prefixes and images; they arrive in bursts or one by one."""
    gap_s = rng.choice([0.0, 0.02, 0.2, 0.4])
    arrivals: list[Arrival] = []
    at_ns = 0
    for index in range(requests):
        at_ns += int(rng.expovariate(1 / gap_s) * 1e9) if gap_s else 0
        before = rng.choice(arrivals) if arrivals and rng.random() < 0.3 else None
        arrivals.append(
            Arrival(
                at_ns=at_ns,
                request_id=f"r{index}",
                prompt=_draw_prompt(rng) if before is None else _draw_turn(rng, before),
                output_tokens=rng.randint(1, 16),
                conversation=f"c{index}" if before is None else before.conversation,
                tenant=rng.choice(["", "", "", "tenant"]) if before is None else before.tenant,
                priority=rng.choice([0, 0, 0, 1, -1]),
                ttft_target_ms=rng.choice([None, None, 100]),
            )
        )
    return tuple(arrivals)


def _draw_turn(rng: random.Random, before: Arrival) -> tuple[PromptPart, ...]:
    """Draw the next conversation turn: the previous prompt and output, and a new text."""
    more = Text(rng.randrange(1000), rng.randint(1, 12))
    return (*before.prompt, Reply(before.output_tokens), more)


def _draw_prompt(rng: random.Random) -> tuple[PromptPart, ...]:
    parts: list[PromptPart] = [Text(rng.randrange(IMAGES), rng.randint(1, 60))]
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        image = rng.randrange(IMAGES)
        parts.append(Image(f"image {image}", 1 + image * 11 % 50))
        parts.append(Text(rng.randrange(1000), rng.randint(1, 12)))
    return tuple(parts)


async def play(scenario: Scenario) -> ScenarioReport:
    """Run a scenario on the running virtual loop until everything has recovered."""
    engine = SimEngine(
        scenario.config,
        seed=scenario.seed,
        faults=scenario.plan,
        links=scenario.links,
        host_links=scenario.host_links,
        costs=slower(QUICK, scenario.slower, scenario.slower),
        choices_max=scenario.choices_max,
    )
    await engine.start()
    try:
        for operation in scenario.operations:
            engine.operate(operation)
        await engine.run(scenario.arrivals)
        with suppress(SimulationFailed):  # the report contains it
            if scenario.shut_down_ns is None:
                await engine.heal()
            else:
                await engine.sleep_until(scenario.shut_down_ns)
                await engine.shut_down()
    finally:
        await engine.stop()
    return _report_on(engine)


def _report_on(engine: SimEngine) -> ScenarioReport:
    world, observer = engine.world, engine.observer
    return ScenarioReport(
        violations=tuple(world.violations_and_hints()),
        digest=engine.digest,
        events=observer.events if observer is not None else 0,
        outcomes=dict(Counter(session.outcome for session in engine.sessions)),
        losses=len(observer.losses) if observer is not None else 0,
        struck=len(world.injector.struck),
        virtual_s=world.loop.time(),
    )


def run_scenario(scenario: Scenario) -> ScenarioReport:
    """Run a scenario on a new virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(play(scenario))


OnReport = Callable[[int, ScenarioReport], None]
"""Called after each scenario with its seed."""


class SwarmFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A failed scenario.

    Attributes:
        violations: The violated invariants.
        plan: The minimized plan: without any of these faults, the scenario passes.
        dropped: Number of faults removed from the plan.
        arguments: Further arguments of the command that reproduces it.
    """

    seed: int
    violations: tuple[str, ...]
    plan: FaultPlan
    dropped: int
    arguments: str = ""

    @property
    def command(self) -> str:
        """The command that reproduces the failure.

        With the plan in a file, `--faults FILE` limits it to the minimized plan.
        """
        return f"vsched simulate --swarm 1 --seed {self.seed}{self.arguments}"

    def describe(self) -> str:
        """Return seed, violations, faults and the reproducing command, one per line."""
        dropped = f" ({self.dropped} more that it fails without)" if self.dropped else ""
        return "\n".join(
            [
                f"seed {self.seed} fails:",
                *(f"  {line}" for line in self.violations),
                f"faults{dropped}: {self.plan.to_json()}",
                f"replay: {self.command}",
            ]
        )


class SwarmOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a swarm; counts are sums over its scenarios.

    Attributes:
        probes: Number of scenarios that reached each probe, in declaration order; 0 if none did.
    """

    scenarios: int
    failures: list[SwarmFailure]
    requests: int
    events: int
    losses: int
    struck: int
    virtual_s: float
    probes: dict[str, int]

    @property
    def unreached(self) -> list[str]:
        """The probes that no scenario reached."""
        return [name for name, scenarios in self.probes.items() if not scenarios]


def swarm(
    count: int,
    *,
    seed: int = 0,
    faults: str | Path | None = None,
    policies: Mapping[str, PolicyTable] = MappingProxyType({}),
    arguments: str = "",
    on_report: OnReport = lambda _seed, _report_on: None,
) -> SwarmOutcome:
    """Run `count` scenarios with consecutive seeds, starting at `seed`, up to the first failure.

    Args:
        count: Number of scenarios.
        seed: The first seed.
        faults: File with a fault plan that replaces the drawn ones.
        policies: Policy tables, by path, that replace the drawn ones.
        arguments: Further arguments of the command that reproduces a failure.
        on_report: Called with the report of each scenario.

    Raises:
        ConfigError: When the plan cannot be read.
    """
    plan = FaultPlan.load(faults) if faults is not None else None
    failures: list[SwarmFailure] = []
    reports: list[ScenarioReport] = []
    probes = dict.fromkeys(PROBES, 0)
    with _quiet():
        for one in range(seed, seed + count):
            scenario = draw_scenario(one).with_policies(policies)
            if plan is not None:
                scenario = scenario.with_faults(plan)
            report = run_guarded(scenario)
            reports.append(report)
            on_report(one, report)
            for name in report.probes:
                probes[name] += 1
            if report.violations:
                failures.append(_shortened(scenario, report, arguments))
                break
    return SwarmOutcome(
        scenarios=len(reports),
        failures=failures,
        requests=sum(sum(report.outcomes.values()) for report in reports),
        events=sum(report.events for report in reports),
        losses=sum(report.losses for report in reports),
        struck=sum(report.struck for report in reports),
        virtual_s=sum(report.virtual_s for report in reports),
        probes=probes,
    )


def run_guarded(scenario: Scenario) -> ScenarioReport:
    """Run a scenario; report an exception as a violation."""
    try:
        with observed() as probes:
            report = run_scenario(scenario)
        return msgspec.structs.replace(report, probes=dict(probes))
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not happen
        return ScenarioReport(violations=(f"{type(error).__name__}: {error}",))


def _shortened(scenario: Scenario, report: ScenarioReport, arguments: str) -> SwarmFailure:
    """Minimize the plan: remove each fault without which the scenario still fails; the others are unaffected."""
    plan = scenario.plan
    for fault in reversed(scenario.plan.faults):
        fewer = msgspec.structs.replace(
            plan, faults=tuple(one for one in plan.faults if one is not fault)
        )
        shorter = run_guarded(scenario.with_faults(fewer))
        if shorter.violations:
            plan, report = fewer, shorter
    return SwarmFailure(
        seed=scenario.seed,
        violations=report.violations,
        plan=plan,
        dropped=len(scenario.plan.faults) - len(plan.faults),
        arguments=arguments,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the logs of engines that are broken on purpose."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
