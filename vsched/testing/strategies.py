"""Hypothesis strategies for fault plans; they shrink to fewer faults, simpler kinds and earlier times.

Hypothesis is not a dependency of vsched: install it to use this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies

from vsched.sim.faults import FAULTS_MAX, AnyFault, FaultPlan, Stage, draw_fault, drawn_kinds

Draw = Callable[[strategies.SearchStrategy[Any]], Any]


def fault_plans(
    groups: Sequence[str],
    span_ns: int,
    *,
    ranks: int = 1,
    kinds: Sequence[type[AnyFault]] | None = None,
    hosts: Sequence[str] = (),
) -> strategies.SearchStrategy[FaultPlan]:
    """Return a strategy for plans of faults; earlier groups and `kinds` are simpler.

    Args:
        groups: Target groups.
        span_ns: Latest start of a fault.
        ranks: Number of ranks per group.
        kinds: Kinds of faults; by default all, with host faults if there are other hosts.
        hosts: The other hosts, by their names in `cluster.hosts`.

    Raises:
        ValueError: When a kind needs a host and there is none.
    """
    stage = Stage(groups=tuple(groups), span_ns=span_ns, ranks=ranks, hosts=tuple(hosts))

    @strategies.composite
    def draw_one(draw: Draw, kind: Any) -> AnyFault:
        return draw_fault(draw(strategies.randoms(use_true_random=False)), kind, stage)

    fault = strategies.one_of([draw_one(kind) for kind in drawn_kinds(hosts, kinds)])

    @strategies.composite
    def plan(draw: Draw) -> FaultPlan:
        # Not `lists`: Hypothesis removes a list element only if it took few choices to draw. After
        # an integer, it removes any element drawn as one piece while it lowers the integer.
        count = draw(strategies.integers(0, FAULTS_MAX))
        drawn = tuple(draw(fault) for _ in range(count))
        return FaultPlan(faults=drawn)

    return plan()
