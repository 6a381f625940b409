"""Scenarios drawn from a seed: a configuration, overlapping requests, and faults; then everything must recover."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from vsched.config import Config
from vsched.config.adapters import AdaptersConfig
from vsched.config.cluster import OWN_HOST, ClusterConfig, check_cluster
from vsched.config.policies import (
    check_combinations,
    check_together,
    policy_table,
    seats_of_table,
)
from vsched.config.section import PolicyTable
from vsched.policy import SEVERAL
from vsched.sim.cluster.client_sessions import adapter_name
from vsched.sim.cluster.engine import SimEngine, groups_of, small_config
from vsched.sim.cluster.operators import (
    Operation,
    draw_adapter_changes,
    draw_operations,
    draw_replacements,
)
from vsched.sim.cluster.plugin import SEEN_TOKENS_MAX, SEES_IMAGES, plugin
from vsched.sim.cluster.pressure import draw_patterns, press_arrivals, press_config
from vsched.sim.cost.calibration import slower
from vsched.sim.faults.plan import (
    FAULTS_MAX,
    HOST_KINDS,
    KINDS,
    FaultPlan,
    Hang,
    MissedDecision,
    OutOfMemory,
    WorkerCrash,
    random_plan,
)
from vsched.sim.invariants import SimulationFailed
from vsched.sim.loop.virtual_loop import VirtualLoop
from vsched.sim.network.channel import LinkProfile
from vsched.sim.network.lane import HostLinkProfile
from vsched.sim.ranks.symbolic_model import DRAFT
from vsched.sim.workload.requests import Arrival, Image, PromptPart, Reply, Text, Video
from vsched.sim.world import QUICK

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

        The tables that the table `policy` stands for are reset to their defaults.
        """
        config, reset = self.config, {}
        if SEVERAL in tables:
            reset = {path: policy_table(Config(), path) for path in seats_of_table(tables[SEVERAL])}
        for path, table in {**reset, **tables}.items():
            section, _, name = path.rpartition(".")
            if section:
                own = msgspec.structs.replace(getattr(config, section), **{name: table})
                config = msgspec.structs.replace(config, **{section: own})
            else:
                config = msgspec.structs.replace(config, **{name: table})
        return msgspec.structs.replace(self, config=config)

    def with_operations(self, more: Iterable[Operation]) -> Scenario:
        """Return the scenario with further operator actions."""
        operations = sorted((*self.operations, *more), key=lambda each: each.at_ns)
        return msgspec.structs.replace(self, operations=tuple(operations))

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


def draw_scenario(seed: int, *, requests: int = REQUESTS) -> Scenario:
    """Draw a scenario."""
    pressed = seed >= FIRST_PRESSED and seed % 2
    drawn = draw_pressed(seed, requests=2 * requests) if pressed else _draw_plain(seed, requests)
    if seed % 10 == 7:
        # Chosen by the seed rather than a draw, so that the scenarios of other models do not
        # change.
        model = msgspec.structs.replace(drawn.config.model, path=SEES_IMAGES)
        # The minimum that suffices: an image waits whenever another prompt takes part of the step.
        room = SEEN_TOKENS_MAX + drawn.config.generate.slots
        generate = msgspec.structs.replace(drawn.config.generate, max_batch_tokens=room)
        config = msgspec.structs.replace(drawn.config, model=model, generate=generate)
        return msgspec.structs.replace(drawn, config=config)
    if seed % 10 == 2:
        rng = random.Random(f"policies {seed}")  # noqa: S311
        return drawn.with_operations(draw_replacements(rng, SPAN_NS))
    if seed % 10 == 3:
        return msgspec.structs.replace(drawn, choices_max=3)
    if seed % 10 == 9:
        return _with_adapters(drawn)
    if seed % 10 == 1:
        return _with_swapping(drawn)
    if seed % 10 == 5:
        return _with_drafts(drawn)
    if seed % 10 in (4, 8):
        return _with_hosts(drawn)
    if seed % 10 == 6:
        return _with_videos(drawn)
    return drawn


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
    return msgspec.structs.replace(
        drawn,
        config=msgspec.structs.replace(drawn.config, cluster=cluster),
        plan=drawn.plan.with_more(more.faults),
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
    generate = msgspec.structs.replace(
        drawn.config.generate,
        draft_model=f"{DRAFT} {rng.choice([0.1, 0.7, 1.0])}",
        drafting=drafting,
    )
    config = msgspec.structs.replace(drawn.config, generate=generate)
    drafts = msgspec.structs.replace(drawn, config=config)
    return _with_swapping(drafts) if rng.random() < 0.3 else drafts


def _with_swapping(drawn: Scenario) -> Scenario:
    """Swap out preempted requests, with space for all, some, or hardly any of them."""
    generate, info = drawn.config.generate, plugin.inspect("", dtype="", item_tokens_max=0)
    places = random.Random(f"swap {drawn.seed}").choice([3, 12, 200])  # noqa: S311
    generate = msgspec.structs.replace(
        generate,
        swap_memory=places * generate.block_size * info.kv_bytes_per_token,
        preemption={**generate.preemption, "mode": "swap"},
    )
    return msgspec.structs.replace(
        drawn, config=msgspec.structs.replace(drawn.config, generate=generate)
    )


def _with_adapters(drawn: Scenario) -> Scenario:
    """Make requests use one of two adapters or none, while operators load and unload a third."""
    adapters = AdaptersConfig(
        count_max=3,
        load={adapter_name(number): "at start" for number in (1, 2)},
        directory="/simulated/adapters",
        load_s=10.0,
    )
    rng = random.Random(f"adapters {drawn.seed}")  # noqa: S311
    config = msgspec.structs.replace(drawn.config, adapters=adapters)
    changed = drawn.with_operations(draw_adapter_changes(rng, SPAN_NS))
    return msgspec.structs.replace(changed, config=config)


def _draw_plain(seed: int, requests: int) -> Scenario:
    rng = random.Random(f"scenario {seed}")  # noqa: S311
    config = draw_config(rng)
    kinds, faults_max = rng.choice([(KINDS, FAULTS_MAX)] * 4 + [(DEADLY, 2 * FAULTS_MAX)])
    return Scenario(
        seed=seed,
        config=config,
        arrivals=draw_arrivals(rng, requests),
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


def draw_pressed(seed: int, *, requests: int) -> Scenario:
    """Draw a scenario under pressure; see `vsched.sim.cluster.pressure`."""
    rng = random.Random(f"pressure {seed}")  # noqa: S311
    config = press_config(rng, draw_config(rng))
    plan, operations = draw_patterns(rng, groups_of(config))
    return Scenario(
        seed=seed,
        config=config,
        arrivals=press_arrivals(rng, draw_arrivals(rng, requests)),
        operations=operations,
        plan=plan,
        links=LinkProfile(jitter_ns=rng.choice([0, 100_000, 2_000_000])),
        slower=rng.choice([1.0, 4.0]),
    )


def draw_config(rng: random.Random) -> Config:
    """Draw a small engine: replicas, ranks, policies, and scarce resources."""
    base = small_config()
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
    config = Config(
        placement="together" if together else "separate",
        model=base.model,
        arena=msgspec.structs.replace(
            base.arena,
            pixel_bytes=rng.choice([8192, 16384]),
            embedding_bytes=1024 * rng.choice([2, 4, 16]),
        ),
        encode=msgspec.structs.replace(
            base.encode,
            replicas=encoders,
            tensor_parallel=ranks,
            encoding=rng.choice(
                [
                    {"use": "chunk-aware"},
                    {"use": "chunk-aware"},
                    {"use": "chunk-aware", "look_ahead_chunks": 100},
                    {"use": "combined"},
                ]
            ),
            admission={"use": "token-budget", "max_items": rng.choice([1, 4, 8])},
        ),
        generate=msgspec.structs.replace(base.generate, **generate),
        routing={"use": rng.choice(["least-loaded", "round-robin", "image-affinity"])},
        deadlines=msgspec.structs.replace(
            base.deadlines, waiting_s=rng.choice([0.0, 0.0, 0.0, 2.0])
        ),
    )
    check_together(config)
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
        with contextlib.suppress(SimulationFailed):  # the report contains it
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
