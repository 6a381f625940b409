"""A fault plan for the fast simulator: what each fault comes to for a group as a whole.

The fast simulator has groups, not ranks, and neither messages nor clients. So of the faults in
`vsched.sim.faults.plan`, one that takes a group down is an outage of it, as long as it takes to be noticed and to
restart; one that makes it slow is slowness. A fault that a group as a whole does not show is refused, rather than
left out in silence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from vsched.config import Config
from vsched.errors import ConfigError
from vsched.sim.fast.faults import Outage, Pause, Slowness, Trouble
from vsched.sim.faults.plan import (
    AnyFault,
    FaultPlan,
    Hang,
    MissedDecision,
    OutOfMemory,
    Partition,
    ReplicaRestart,
    Slowdown,
    WorkerCrash,
)

Span = tuple[float, float]


def troubles_of(plan: FaultPlan, config: Config, *, restart_s: float) -> list[Trouble]:
    """Return what the faults of a plan come to for the groups of a server.

    Args:
        plan: What goes wrong.
        config: Says when a rank that hangs is given up, and which groups share processes.
        restart_s: From the loss of a group until it serves again.

    Raises:
        ConfigError: When a fault is of a kind that only whole engines have.
    """
    patience_s = config.deadlines.rank_timeout_s
    slow: list[Trouble] = []
    down: defaultdict[str, list[Span]] = defaultdict(list)
    for fault in plan.faults:
        at_s, end_s = fault.at_ns / 1e9, fault.end_ns / 1e9
        match fault:
            case Slowdown(group=group, factor=factor):
                slow.append(Slowness(group=group, from_s=at_s, to_s=end_s, factor=factor))
            case Hang(group=group) | Partition(group=group):
                noticed_s = at_s + patience_s
                slow.append(Pause(group=group, from_s=at_s, to_s=min(end_s, noticed_s)))
                if end_s > noticed_s:
                    down[group].append((noticed_s, noticed_s + restart_s))
            case WorkerCrash() | OutOfMemory() | MissedDecision() | ReplicaRestart():
                down[fault.group].append((at_s, at_s + restart_s))
            case _:
                raise _only_whole_engines(fault)
    return [*slow, *_outages(down, together=config.placement == "together")]


def _outages(down: dict[str, list[Span]], *, together: bool) -> list[Outage]:
    """Return outages that do not overlap: who is down already is not lost again."""
    worker_groups: defaultdict[str, list[str]] = defaultdict(list)
    for group in down:
        worker_groups[group.partition("-")[2] if together else group].append(group)
    return [
        Outage(group=groups[0], lost_s=lost_s, back_s=back_s)
        for groups in worker_groups.values()
        for lost_s, back_s in _united([span for group in groups for span in down[group]])
    ]


def _united(spans: Sequence[Span]) -> list[Span]:
    united: list[Span] = []
    for start, end in sorted(spans):
        if united and start <= united[-1][1]:
            united[-1] = united[-1][0], max(end, united[-1][1])
        else:
            united.append((start, end))
    return united


def _only_whole_engines(fault: AnyFault) -> ConfigError:
    kind = type(fault).__struct_config__.tag
    return ConfigError(
        f"faults: {kind} at {fault.at_ns / 1e9:g} s: this simulator has groups, but neither messages, images nor "
        "clients. Remedy: leave it out, or run whole engines with `vsched simulate --swarm`"
    )
