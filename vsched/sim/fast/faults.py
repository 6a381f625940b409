"""Fault plans in the fast simulator: the effect of each fault on a whole group.

The fast simulator has groups but no ranks, messages or clients. A fault that takes a group down
becomes an outage that lasts as long as detection and restart; one that stalls a rank delays the
steps of its group; an encoder without memory fails its next batch. A fault without an effect on a
whole group raises an error instead of being ignored.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from vsched.config import Config
from vsched.errors import ConfigError
from vsched.failures import EncodeErrorKind
from vsched.sim.cost.observations import Span, united
from vsched.sim.fast.groups import SimulatedGroup, TimedEncodeGroup
from vsched.sim.faults.plan import (
    FaultPlan,
    GroupOutage,
    Hang,
    MissedDecision,
    OutOfMemory,
    Partition,
    ReplicaRestart,
    Slowdown,
    WorkerCrash,
)
from vsched.types import stage_of

GroupFault = GroupOutage | Slowdown | Hang | OutOfMemory
"""Faults with an effect on a whole group; other faults of a plan are converted to these."""
REMEDY = (
    "this simulator has groups, but neither messages, images nor clients. Remedy: leave it out, or run whole engines "
    "with `vsched simulate --swarm`"
)


def group_faults(plan: FaultPlan, config: Config, *, restart_s: float) -> list[GroupFault]:
    """Convert a plan to faults of groups; a hang ends no later than its detection.

    Args:
        plan: The planned faults.
        config: Provides the hang timeout and the groups that share processes.
        restart_s: From the loss of a group until it serves again.

    Raises:
        ConfigError: When a fault needs a whole simulated engine.
    """
    patience_ns, restart_ns = int(config.deadlines.rank_timeout_s * 1e9), int(restart_s * 1e9)
    found: list[GroupFault] = []
    down: defaultdict[str, list[Span]] = defaultdict(list)
    for fault in plan.faults:
        match fault:
            case Slowdown():
                found.append(fault)
            case OutOfMemory(during="step", group=group) if stage_of(group) == "encode":
                found.append(fault)
            case Hang(group=group) | Partition(group=group):
                noticed_ns = fault.at_ns + patience_ns
                held_ns = min(fault.duration_ns, patience_ns)
                found.append(Hang(at_ns=fault.at_ns, duration_ns=held_ns, group=group))
                if fault.end_ns > noticed_ns:
                    down[group].append((noticed_ns, noticed_ns + restart_ns))
            case GroupOutage(group=group, duration_ns=duration_ns):
                end_ns = math.inf if duration_ns is None else fault.at_ns + duration_ns
                down[group].append((fault.at_ns, end_ns))
            case WorkerCrash() | OutOfMemory() | MissedDecision() | ReplicaRestart():
                down[fault.group].append((fault.at_ns, fault.at_ns + restart_ns))
            case _:
                raise fault.refused(REMEDY)
    return [*found, *_outages(down, together=config.placement == "together")]


def _outages(down: Mapping[str, list[Span]], *, together: bool) -> list[GroupOutage]:
    """Return non-overlapping outages: a group that is already down is not lost again."""
    worker_groups: defaultdict[str, list[str]] = defaultdict(list)
    for group in down:
        worker_groups[group.partition("-")[2] if together else group].append(group)
    return [
        GroupOutage(
            at_ns=start, duration_ns=None if end == math.inf else int(end) - start, group=groups[0]
        )
        for groups in worker_groups.values()
        for start, end in united([span for group in groups for span in down[group]])
    ]


class GroupDown(msgspec.Struct, frozen=True):
    """A group is lost, temporarily or for good."""

    group: SimulatedGroup
    for_good: bool


class GroupUp(msgspec.Struct, frozen=True):
    """A group serves."""

    group: SimulatedGroup


Change = GroupDown | GroupUp | Callable[[], None]
"""A state change of a group; plain callables send no event to the scheduler."""


def changes(
    faults: Iterable[GroupFault], groups: Sequence[SimulatedGroup], *, start_ns: int
) -> Iterator[tuple[int, Change]]:
    """Yield state changes of groups with their times, for a workload that begins at `start_ns`.

    Raises:
        ConfigError: When a group is unknown.
    """
    named = {group.name: group for group in groups}
    for fault in faults:
        group = named.get(fault.group)
        if group is None:
            raise ConfigError(f"{fault.group}: no such group. Known: {', '.join(named)}")
        at_ns, end_ns = start_ns + fault.at_ns, start_ns + fault.end_ns
        match fault:
            case GroupOutage(duration_ns=duration_ns):
                for one in groups:
                    if one.device is group.device:
                        yield at_ns, GroupDown(one, for_good=duration_ns is None)
                        if duration_ns is not None:
                            yield end_ns, GroupUp(one)
            case OutOfMemory():
                assert isinstance(group, TimedEncodeGroup)
                yield at_ns, partial(group.faults.append, EncodeErrorKind.OUT_OF_MEMORY)
            case Slowdown(factor=factor):
                yield at_ns, partial(setattr, group, "slowdown", factor)
                yield end_ns, partial(setattr, group, "slowdown", 1.0)
            case Hang():
                yield at_ns, partial(setattr, group, "held_ns", end_ns)
