"""Effects of each kind of fault on an engine and its requests."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any, get_args

import msgspec
import pytest

from vsched.errors import DeviceOutOfMemory
from vsched.sim.cluster import SimEngine, small_config
from vsched.sim.faults import (
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
        for index in range(30)
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


def lasting(kind: Callable[..., AnyFault], seconds: float = 1, **more: Any) -> AnyFault:
    """Return a fault of the generate group, unless the other is named."""
    times = {"at_ns": SECOND_NS, "duration_ns": int(seconds * SECOND_NS)}
    return kind(**{"group": "generate", **times, **more})


OFTEN: list[tuple[AnyFault, str, dict[str, int]]] = [
    (WorkerCrash(at_ns=SECOND_NS, group="generate"), SEGFAULT, {}),
    (lasting(Hang, 60), SILENT, {}),
    (lasting(Slowdown, factor=10.0), "", {}),
    (Disconnect(at_ns=SECOND_NS, phase="wait"), "", {"left": 1}),
    (
        FetchStall(at_ns=SECOND_NS, duration_ns=60 * SECOND_NS),
        "",
        {"refused image_fetch_failed": 1},
    ),
    (DecodeError(at_ns=SECOND_NS), "", {"refused image_invalid": 1}),
]
"""Faults, with the reason for which their group is lost, and the requests that do not finish."""
OTHERS: list[tuple[AnyFault, str, dict[str, int]]] = [
    *(
        (WorkerCrash(at_ns=SECOND_NS, group=group, moment=moment), SEGFAULT, {})
        for group in GROUPS
        for moment in get_args(Moment)
    ),
    (lasting(Hang, 60, group="encode"), SILENT, {}),
    *((lasting(Hang, group=group), "", {}) for group in GROUPS),
    (LostHeartbeat(at_ns=SECOND_NS, group="generate"), "", {}),
    (LateHeartbeat(at_ns=SECOND_NS, group="generate", late_ns=SECOND_NS // 10), "", {}),
    (lasting(Partition), "", {}),
    (TiePermutation(at_ns=SECOND_NS, seed=3), "", {}),
    *(
        (Disconnect(at_ns=SECOND_NS, phase=phase), "", {"left": 1})
        for phase in get_args(RequestPhase)
    ),
    (FetchStall(at_ns=SECOND_NS, duration_ns=SECOND_NS), "", {}),
]


@pytest.mark.parametrize(
    ("fault", "lost", "ended"),
    [*OFTEN, *(pytest.param(*row, marks=pytest.mark.thorough) for row in OTHERS)],
    ids=lambda one: type(one).__name__,
)
@pytest.mark.sim
async def test_fault_costs_a_restart_a_request_or_time(
    sim_engine: Engines, fault: AnyFault, lost: str, ended: dict[str, int]
) -> None:
    engine = await strike(sim_engine, fault)
    assert len(losses(engine)) == bool(lost)
    assert lost in "".join(losses(engine))
    assert ends(engine) == ended


@pytest.mark.parametrize("group", ["generate", pytest.param("encode", marks=pytest.mark.thorough)])
@pytest.mark.sim
async def test_missed_decision_is_a_desync(sim_engine: Engines, group: str) -> None:
    """One rank of two misses an entry that the other receives."""
    engine = await strike(sim_engine, MissedDecision(at_ns=SECOND_NS, group=group, rank=1), ranks=2)
    assert "rank 1 stopped with RankDesync" in losses(engine)[0]
    assert not ends(engine)


CUT = Partition(at_ns=SECOND_NS, group="generate", duration_ns=10 * SECOND_NS)


DAMAGES = [
    MessageFault(
        at_ns=SECOND_NS,
        group="generate",
        duration_ns=SECOND_NS // 20,
        direction=direction,
        effect=effect,
    )
    for effect, direction in zip(get_args(Effect), cycle(get_args(Direction)), strict=False)
]
MORE_DAMAGES = [*DAMAGES[1:], msgspec.structs.replace(CUT, frames="lost")]


@pytest.mark.parametrize(
    "fault",
    [DAMAGES[0], CUT, *(pytest.param(one, marks=pytest.mark.thorough) for one in MORE_DAMAGES)],
    ids=lambda one: getattr(one, "effect", "partition"),
)
@pytest.mark.sim
async def test_damaged_link_is_recovered_from(
    sim_engine: Engines, fault: MessageFault | Partition
) -> None:
    """Links are ordered and reliable: violations are detected, and cost a restart."""
    engine = await strike(sim_engine, fault)
    assert bool(losses(engine)) == (getattr(fault, "effect", "") != "delay")
    assert not ends(engine)


@pytest.mark.parametrize(
    ("ranks", "group", "lost"),
    [
        (2, "encode", 0),
        (1, "generate", 1),
        pytest.param(1, "encode", 0, marks=pytest.mark.thorough),
        pytest.param(2, "generate", 1, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.sim
async def test_step_without_memory(sim_engine: Engines, group: str, lost: int, ranks: int) -> None:
    """An encoder splits its batch and retries; a generator restarts."""
    engine = await strike(sim_engine, OutOfMemory(at_ns=SECOND_NS, group=group), ranks=ranks)
    assert len(losses(engine)) == lost
    assert not ends(engine)


@pytest.mark.sim
async def test_operator_restarts_a_group(sim_engine: Engines) -> None:
    """A restart without memory is tried again."""
    restart = ReplicaRestart(at_ns=SECOND_NS, group="generate")
    lacking = OutOfMemory(at_ns=SECOND_NS, group="generate", during="load")
    engine = await strike(sim_engine, restart, lacking)
    assert engine.observer is not None
    assert [(loss.group, loss.planned) for loss in engine.observer.losses] == [("generate", True)]
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
