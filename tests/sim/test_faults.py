"""Effects of each kind of fault on an engine and its requests."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import get_args

import pytest

from vsched.errors import DeviceOutOfMemory
from vsched.sim.cluster import SimEngine, small_config
from vsched.sim.faults import (
    KINDS,
    AnyFault,
    DecodeError,
    Direction,
    Disconnect,
    Effect,
    FaultPlan,
    FetchStall,
    Hang,
    LateHeartbeat,
    LostHeartbeat,
    MessageFault,
    MissedDecision,
    Moment,
    OutOfMemory,
    Partition,
    ReplicaRestart,
    RequestPhase,
    Slowdown,
    TiePermutation,
    WorkerCrash,
)
from vsched.sim.workload.requests import Arrival, Image, Text

Engines = Callable[..., SimEngine]
SECOND_NS = 1_000_000_000
SECONDS = 2


def requests() -> list[Arrival]:
    """Return a request every fifty milliseconds, half of them with images."""
    return [
        Arrival(
            at_ns=index * SECOND_NS // 20,
            request_id=f"r{index}",
            prompt=(Text(index, 20), Image(f"image {index}", 12), Text(index, 5))
            if index % 2
            else (Text(index, 60),),
            output_tokens=8,
        )
        for index in range(20 * SECONDS)
    ]


async def strike(sim_engine: Engines, *faults: AnyFault, ranks: int = 1) -> SimEngine:
    """Run requests past faults to the healed end; all of the faults must have occurred."""
    config = small_config(encode={"tensor_parallel": ranks}, generate={"tensor_parallel": ranks})
    async with sim_engine(config, faults=FaultPlan(faults=faults)) as engine:
        await engine.run(requests())
        await engine.heal()
    moved = [one.fault for one in engine.world.injector.struck]
    assert [type(one) for one in moved] == [type(one) for one in faults]
    return engine


def losses(engine: SimEngine) -> list[str]:
    """Return the reasons of lost groups."""
    assert engine.observer is not None
    return [f"{loss.group}: {loss.reason}" for loss in engine.observer.losses]


def ends(engine: SimEngine) -> dict[str, int]:
    """Number of requests by kind of end, other than finished ones."""
    found: dict[str, int] = {}
    for session in engine.sessions:
        if session.outcome != "finished":
            end = f"{session.outcome} {session.code}".strip()
            found[end] = found.get(end, 0) + 1
    return found


GROUPS = ("encode", "generate")


SEGFAULT, SILENT = "was killed by SIGSEGV", "was silent for"
EFFECTS: list[tuple[AnyFault, str, dict[str, int]]] = [
    *(
        (WorkerCrash(at_ns=SECOND_NS, group=group, moment=moment), SEGFAULT, {})
        for group in GROUPS
        for moment in get_args(Moment)
    ),
    *(
        (Hang(at_ns=SECOND_NS, group=group, duration_ns=seconds * SECOND_NS), reason, {})
        for group in GROUPS
        for seconds, reason in ((1, ""), (60, SILENT))
    ),
    (Slowdown(at_ns=SECOND_NS, group="generate", duration_ns=SECOND_NS, factor=10.0), "", {}),
    (LostHeartbeat(at_ns=SECOND_NS, group="generate"), "", {}),
    (LateHeartbeat(at_ns=SECOND_NS, group="generate", late_ns=SECOND_NS // 10), "", {}),
    (Partition(at_ns=SECOND_NS, group="generate", duration_ns=SECOND_NS), "", {}),
    (TiePermutation(at_ns=SECOND_NS, seed=3), "", {}),
    *(
        (Disconnect(at_ns=SECOND_NS, phase=phase), "", {"left": 1})
        for phase in get_args(RequestPhase)
    ),
    (FetchStall(at_ns=SECOND_NS, duration_ns=SECOND_NS), "", {}),
    (
        FetchStall(at_ns=SECOND_NS, duration_ns=60 * SECOND_NS),
        "",
        {"refused image_fetch_failed": 1},
    ),
    (DecodeError(at_ns=SECOND_NS), "", {"refused image_invalid": 1}),
]
"""Faults, with the reason for which their group is lost, and the requests that do not finish."""


@pytest.mark.parametrize(("fault", "lost", "ended"), EFFECTS, ids=lambda one: type(one).__name__)
@pytest.mark.sim
async def test_fault_costs_a_restart_a_request_or_time(
    sim_engine: Engines, fault: AnyFault, lost: str, ended: dict[str, int]
) -> None:
    engine = await strike(sim_engine, fault)
    assert len(losses(engine)) == bool(lost)
    assert lost in "".join(losses(engine))
    assert ends(engine) == ended


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.sim
async def test_missed_decision_is_a_desync(sim_engine: Engines, group: str) -> None:
    """One rank of two misses an entry that the other receives."""
    engine = await strike(sim_engine, MissedDecision(at_ns=SECOND_NS, group=group, rank=1), ranks=2)
    assert "rank 1 stopped with RankDesync" in losses(engine)[0]
    assert not ends(engine)


@pytest.mark.parametrize(
    ("effect", "direction"), [*zip(get_args(Effect), cycle(get_args(Direction)))]
)
@pytest.mark.sim
async def test_damaged_link_is_recovered_from(
    sim_engine: Engines, effect: Effect, direction: Direction
) -> None:
    """Links are ordered and reliable: violations are detected, and cost a restart."""
    fault = MessageFault(
        at_ns=SECOND_NS,
        group="generate",
        duration_ns=SECOND_NS // 20,
        direction=direction,
        effect=effect,
    )
    engine = await strike(sim_engine, fault)
    assert bool(losses(engine)) == (effect != "delay")
    assert not ends(engine)


@pytest.mark.parametrize("frames", ["held", "lost"])
@pytest.mark.sim
async def test_partition_is_noticed(sim_engine: Engines, frames: str) -> None:
    fault = Partition(
        at_ns=SECOND_NS,
        group="generate",
        duration_ns=10 * SECOND_NS,
        frames=frames,  # type: ignore[arg-type]
    )
    engine = await strike(sim_engine, fault)
    assert losses(engine)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("group", "lost"), [("encode", 0), ("generate", 1)])
@pytest.mark.sim
async def test_step_without_memory(sim_engine: Engines, group: str, lost: int, ranks: int) -> None:
    """An encoder splits its batch and retries; a generator restarts."""
    engine = await strike(sim_engine, OutOfMemory(at_ns=SECOND_NS, group=group), ranks=ranks)
    assert len(losses(engine)) == lost
    assert not ends(engine)


@pytest.mark.sim
async def test_restart_without_memory_is_tried_again(sim_engine: Engines) -> None:
    crash = WorkerCrash(at_ns=SECOND_NS, group="generate")
    lacking = OutOfMemory(at_ns=SECOND_NS, group="generate", during="load")
    engine = await strike(sim_engine, crash, lacking)
    assert engine.world.launches["generate"] == 3
    assert not ends(engine)


@pytest.mark.sim
async def test_start_without_memory_fails(sim_engine: Engines) -> None:
    """With the error of the rank, and nothing is left behind."""
    plan = FaultPlan(faults=(OutOfMemory(group="generate", during="load"),))
    engine = sim_engine(faults=plan, origin_ns=0)
    with pytest.raises(DeviceOutOfMemory, match="no memory for the weights of generate"):
        await engine.start()
    await engine.stop()
    assert engine.engine.state == "stopped"


@pytest.mark.sim
async def test_operator_restarts_a_group(sim_engine: Engines) -> None:
    engine = await strike(sim_engine, ReplicaRestart(at_ns=SECOND_NS, group="generate"))
    assert engine.observer is not None
    assert [(loss.group, loss.planned) for loss in engine.observer.losses] == [("generate", True)]
    assert not ends(engine)


def test_every_kind_of_fault_is_tried() -> None:
    with open(__file__, encoding="utf-8") as file:
        text = file.read()
    for kind in KINDS:
        assert text.count(f"{kind.__name__}(") >= 1, f"{kind.__name__} is not tried"


@pytest.mark.sim
async def test_slow_stretch_leaves_nothing_behind(sim_engine: Engines) -> None:
    """A neighbour takes the cores for half a minute: no group or request is lost, and chunk sizes recover."""
    stretch = Slowdown(
        at_ns=5 * SECOND_NS, group="generate", duration_ns=30 * SECOND_NS, factor=5.0
    )
    generate = {"chunk_tokens": 64, "step_target_ms": 8.0, "step_target_ratio": 1.5}
    config = small_config(generate=generate, arrival={"use": "deadline-shed"})
    arrivals = [
        Arrival(
            at_ns=index * SECOND_NS // 5,
            request_id=f"r{index}",
            prompt=(Text(index, 90),),
            output_tokens=12,
        )
        for index in range(190)
    ]
    chunks: list[int] = []

    async with sim_engine(config, faults=FaultPlan(faults=(stretch,))) as engine:
        assert engine.observer is not None
        (group,) = engine.observer.kernel.generators
        for first, last in ((0, 25), (25, 175), (175, 180), (180, 190)):
            await engine.run(arrivals[first:last])
            budget = group.step_times.budget_for(64, decodes=2)
            chunks.append(budget.tokens_at(0))
        await engine.heal()
    assert not losses(engine)
    assert not ends(engine)
    before, _, after, later = chunks
    assert 8 < before < 64
    assert min(after, later) >= before - config.generate.block_size, chunks
