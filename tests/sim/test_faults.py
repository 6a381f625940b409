"""Effects of each kind of fault on an engine and its requests."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any, NamedTuple, get_args

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
SEGFAULT, SILENT, DESYNC = "was killed by SIGSEGV", "was silent for", "stopped with RankDesync"
ANY = ": "
"""Part of each reason."""


def lasting(kind: Callable[..., AnyFault], seconds: float = 1, **more: Any) -> AnyFault:
    """Return a fault of the generate group, unless the other is named."""
    times = {"at_ns": SECOND_NS, "duration_ns": int(seconds * SECOND_NS)}
    return kind(**{"group": "generate", **times, **more})


class Case(NamedTuple):
    """A fault, the reason for which its group is lost, and the end of the one request that does not finish."""

    fault: AnyFault
    lost: str = ""
    ended: str = ""
    ranks: int = 1


DAMAGES = [
    Case(
        lasting(MessageFault, 0.05, direction=way, effect=effect), "" if effect == "delay" else ANY
    )
    for effect, way in zip(get_args(Effect), cycle(get_args(Direction)), strict=False)
]
"""Links are ordered and reliable: violations are detected, and cost a restart."""
OFTEN = [
    Case(WorkerCrash(at_ns=SECOND_NS, group="generate"), SEGFAULT),
    Case(lasting(Hang, 60), SILENT),
    Case(lasting(Slowdown, factor=10.0)),
    Case(Disconnect(at_ns=SECOND_NS, phase="wait"), "", "left"),
    Case(FetchStall(at_ns=SECOND_NS, duration_ns=60 * SECOND_NS), "", "refused image_fetch_failed"),
    Case(DecodeError(at_ns=SECOND_NS), "", "refused image_invalid"),
    # One rank of two misses an entry that the other receives.
    Case(MissedDecision(at_ns=SECOND_NS, group="generate", rank=1), DESYNC, ranks=2),
    # An encoder without memory splits its batch and retries; a generator restarts.
    Case(OutOfMemory(at_ns=SECOND_NS, group="encode"), ranks=2),
    Case(OutOfMemory(at_ns=SECOND_NS, group="generate"), ANY),
    Case(lasting(Partition, 10), ANY),
    DAMAGES[0],
]
OTHERS = [
    *(
        Case(WorkerCrash(at_ns=SECOND_NS, group=group, moment=moment), SEGFAULT)
        for group in GROUPS
        for moment in get_args(Moment)
    ),
    Case(lasting(Hang, 60, group="encode"), SILENT),
    *(Case(lasting(Hang, group=group)) for group in GROUPS),
    Case(LostHeartbeat(at_ns=SECOND_NS, group="generate")),
    Case(LateHeartbeat(at_ns=SECOND_NS, group="generate", late_ns=SECOND_NS // 10)),
    Case(lasting(Partition)),
    Case(lasting(Partition, 10, frames="lost"), ANY),
    Case(TiePermutation(at_ns=SECOND_NS, seed=3)),
    *(Case(Disconnect(at_ns=SECOND_NS, phase=one), "", "left") for one in get_args(RequestPhase)),
    Case(FetchStall(at_ns=SECOND_NS, duration_ns=SECOND_NS)),
    Case(MissedDecision(at_ns=SECOND_NS, group="encode", rank=1), DESYNC, ranks=2),
    Case(OutOfMemory(at_ns=SECOND_NS, group="encode")),
    Case(OutOfMemory(at_ns=SECOND_NS, group="generate"), ANY, ranks=2),
    *DAMAGES[1:],
]


@pytest.mark.parametrize(
    "case",
    [*OFTEN, *(pytest.param(case, marks=pytest.mark.thorough) for case in OTHERS)],
    ids=lambda case: type(case.fault).__name__,
)
@pytest.mark.sim
async def test_fault_costs_a_restart_a_request_or_time(sim_engine: Engines, case: Case) -> None:
    engine = await strike(sim_engine, case.fault, ranks=case.ranks)
    assert len(losses(engine)) == bool(case.lost)
    assert case.lost in "".join(losses(engine))
    assert ends(engine) == ({case.ended: 1} if case.ended else {})


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
