"""Checks of a whole run: timely fault detection, a cause for every group loss, and no leaked resources."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from vsched.aio.worker_groups import RESTART_DELAYS_S
from vsched.sim.cluster.observer import EngineObserver
from vsched.sim.faults.injection import Struck
from vsched.sim.faults.plan import (
    DecodeError,
    Disconnect,
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
    TiePermutation,
    WorkerCrash,
)
from vsched.sim.world import World
from vsched.types import stage_of

if TYPE_CHECKING:
    from vsched.config import Config
    from vsched.config.sections import DeadlinesConfig
    from vsched.engine import Engine
    from vsched.sim.cluster.client_sessions import ClientSession
    from vsched.sim.cluster.machines import SimulatedCluster, Strike
    from vsched.sim.cluster.operators import Operation
    from vsched.sim.faults.plan import FaultPlan

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


class CheckedRun(Protocol):
    """The part of a run that these checks read; see `vsched.sim.cluster.engine.SimEngine`."""

    config: Config
    plan: FaultPlan
    world: World
    observer: EngineObserver | None
    engine: Engine
    launcher: SimulatedCluster
    sessions: list[ClientSession]
    operations: list[Operation]
    was_shut_down: bool


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


def check_detection(
    world: World,
    observer: EngineObserver,
    deadlines: DeadlinesConfig,
    hosts: Mapping[str, Collection[str]],
) -> None:
    """Check that every fault that disables a group is detected in bounded time.

    `hosts` are the hosts on which each group ran: a report that a cut or slow link holds up is
    late, and then silence is detected.
    """
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
            world.violate(f"not noticed within {limit_s:g} s: {_reported(struck)}")


def check_hosts(
    world: World, strikes: Sequence[Strike], observer: EngineObserver, deadlines: DeadlinesConfig
) -> None:
    """Check that every lasting host fault takes down all groups of the host, in bounded time."""
    slow = _slow_hosts(world)
    for strike in strikes:
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


def _reported(struck: Struck) -> str:
    return f"{struck.fault} struck at {struck.now_ns / SECOND_NS:.9f} s"


def check_causes(world: World, observer: EngineObserver) -> None:
    """Check that every group loss has a fault as its cause."""
    causes = [one.fault for one in world.injector.struck if not isinstance(one.fault, HARMLESS)]
    wires = [one for one in causes if isinstance(one, MessageFault | MissedDecision | Partition)]
    for loss in observer.losses:
        found = wires if "RankDesync" in loss.reason else causes
        world.expect(found or loss.planned, f"{loss.group} was lost without a cause: {loss.reason}")


def check_ends(run: CheckedRun) -> None:
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


async def check_healed(run: CheckedRun) -> None:
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
    check_detection(world, observer, limits, run.launcher.hosts)
    check_hosts(world, run.launcher.strikes, observer, limits)
    _check_given_up(run)
    check_causes(world, observer)
    check_ends(run)
    if served.state in ("ready", "degraded"):
        _check_nothing_held(run, observer)


def _check_given_up(run: CheckedRun) -> None:
    """Check that a group was retired only after all restart attempts."""
    for row in run.engine.groups():
        launches = run.world.launches[row["name"]]
        given_up = row["state"] == "retired"
        run.world.expect(
            not given_up or launches > len(RESTART_DELAYS_S),
            f"{row['name']} was retired after {launches} starts",
        )


def _rests(run: CheckedRun, observer: EngineObserver) -> bool:
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


def _check_nothing_held(run: CheckedRun, observer: EngineObserver) -> None:
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
        expect(not count, f"in the end, {what} are held by nobody: {count}")
    for stage in kernel.generators:
        for rank in run.launcher.ranks:
            kept = rank.sequences(stage.name) if rank.alive else None
            expect(
                kept is None or kept == stage.unannounced,
                f"in the end, a rank of {stage.name} keeps requests {kept}, not {stage.unannounced}",
            )
