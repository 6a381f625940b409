"""Comparison of simulation outcomes: a table for the terminal, and JSON for programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.markup import escape
from rich.table import Table

from vsched.sim.fast.metrics import SimulationFigures, SimulationOutcome

QUANTILES = ("p50", "p95", "p99")
TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "e2e": "End to end: from sending to the last token",
    "itl": "Between two tokens",
}


class Measure(NamedTuple):
    """A row of the comparison.

    Attributes:
        better: `less` or `more`; empty if neither is better.
        text: Format of a value.
        part: Whether it is a breakdown of the row above, and indented.
    """

    name: str
    value: Callable[[SimulationFigures], float]
    better: str = ""
    text: str = "{:,.0f}"
    part: bool = False


LATENCIES = {
    "TTFT": "ttft_ms",
    "ITL": "itl_ms",
    "TPOT": "tpot_ms",
    "end to end": "e2e_ms",
    "in queue": "queue_ms",
}
FAILED = "refused or failed"
POLICY_FAILURES = "failures of policies"
OVERRULED = "answers of policies overruled"
MEASURES = [
    Measure("requests", lambda one: one.requests),
    Measure("finished", lambda one: one.finished, "more"),
    Measure(FAILED, lambda one: sum(one.failed.values()), "less"),
    Measure(POLICY_FAILURES, lambda one: sum(one.policy_faults.values()), "less"),
    Measure(OVERRULED, lambda one: sum(one.policy_overruled.values())),
    Measure("longest passed over, s", lambda one: one.passed_over_s, "less", "{:,.1f}"),
    *(
        Measure(f"{name} {quantile}, ms", attrgetter(f"{field}.{quantile}"), "less", "{:,.1f}")
        for name, field in LATENCIES.items()
        for quantile in QUANTILES
    ),
    Measure("goodput, requests/s", lambda one: one.goodput, "more", "{:,.2f}"),
    Measure("within targets", lambda one: one.good_share, "more", "{:.1%}"),
    Measure("throughput, requests/s", lambda one: one.requests_s, "more", "{:,.2f}"),
    Measure("output tokens/s", lambda one: one.output_tokens_s, "more"),
    Measure("prefix cache hits", lambda one: one.prefix_hits, "more", "{:.1%}"),
    Measure("embedding cache hits", lambda one: one.embedding_hits, "more", "{:.1%}"),
    Measure("images encoded", lambda one: one.images_encoded, "less"),
    Measure("preemptions", lambda one: one.preemptions, "less"),
    Measure("encoders busy", lambda one: one.encode_busy, "", "{:.1%}"),
    Measure("generators busy", lambda one: one.generate_busy, "", "{:.1%}"),
    Measure("encoder steps", lambda one: one.encode_steps),
    Measure("generator steps", lambda one: one.generate_steps),
    Measure("simulated time, s", lambda one: one.span_s, "", "{:,.1f}"),
]
"""Compared measures, in order."""


def measures_of(
    outcomes: Sequence[SimulationOutcome], *, with_tenants: bool = True
) -> list[Measure]:
    """Return the rows of a comparison, with one for each code, reason and policy in any of the outcomes.

    Those of tenants follow with `with_tenants`.
    """
    every = [one.figures for one in outcomes]
    found: list[Measure] = []
    for measure in MEASURES:
        found.append(measure)
        if measure.name == FAILED:
            found += _counts("", every, lambda one: one.failed)
            found += _counts("shed: ", every, lambda one: one.reasons)
        elif measure.name == POLICY_FAILURES:
            found += _counts("failures of ", every, lambda one: one.policy_faults)
        elif measure.name == OVERRULED:
            found += _counts("", every, lambda one: one.policy_overruled)
    for tenant in tenants_of(outcomes) if with_tenants else ():
        found += measures_of_tenant(tenant, outcomes, prefix=f"{tenant}: ")
    return found


def tenants_of(outcomes: Sequence[SimulationOutcome]) -> list[str]:
    """Return the tenants with figures of their own in any of the outcomes."""
    return [*dict.fromkeys(name for one in outcomes for name in one.figures.tenants)]


Counts = Callable[[SimulationFigures], Mapping[str, int]]


def _counts(prefix: str, every: Sequence[SimulationFigures], counts: Counts) -> list[Measure]:
    """Return a row for each name counted in any of the figures."""

    def measure(name: str) -> Measure:
        return Measure(f"{prefix}{name}", lambda one: counts(one).get(name, 0), part=True)

    return [measure(name) for name in sorted({name for one in every for name in counts(one)})]


def measures_of_tenant(
    tenant: str, outcomes: Sequence[SimulationOutcome], prefix: str = ""
) -> list[Measure]:
    """Return the rows of a tenant."""
    every = [one.figures for one in outcomes]

    def of(value: Callable[[Any], float]) -> Callable[[SimulationFigures], float]:
        return lambda one: value(one.tenants[tenant]) if tenant in one.tenants else 0

    def codes(one: SimulationFigures) -> Mapping[str, int]:
        return one.tenants[tenant].failed if tenant in one.tenants else {}

    return [
        Measure(f"{prefix}requests", of(lambda one: one.requests)),
        Measure(f"{prefix}finished", of(lambda one: one.finished), "more"),
        Measure(f"{prefix}{FAILED}", of(lambda one: sum(one.failed.values())), "less"),
        *_counts(prefix, every, codes),
        Measure(f"{prefix}output tokens", of(lambda one: one.output_tokens), "more"),
        *(
            measure._replace(name=f"{prefix}{measure.name}", value=of(measure.value))
            for measure in MEASURES
            if measure.name.startswith(("TTFT ", "TPOT "))
        ),
        Measure(f"{prefix}within targets", of(lambda one: one.good_share), "more", "{:.1%}"),
    ]


SAME = 0.005
"""Values within this relative difference count as equal."""


def best(measure: Measure, outcomes: Sequence[SimulationOutcome]) -> set[int]:
    """Return the outcomes with the best value; empty if neither direction is better, or all values are equal."""
    values = [measure.value(outcome.figures) for outcome in outcomes]
    if not measure.better or len(values) < 2:
        return set()
    wanted = min(values) if measure.better == "less" else max(values)
    margin = SAME * max(abs(wanted), 1e-9)
    found = {index for index, value in enumerate(values) if abs(value - wanted) <= margin}
    return found if len(found) < len(values) else set()


def comparison(outcomes: Sequence[SimulationOutcome]) -> Table:
    """Return outcomes as a table with a column each; the best value of a row is highlighted."""
    first = outcomes[0]
    title = f"{first.workload}, {first.figures.requests:,} requests, cost model {first.cost}"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for outcome in outcomes:
        table.add_column(outcome.label, justify="right", no_wrap=True)
    for measure in measures_of(outcomes):
        winners = best(measure, outcomes)
        cells = [
            f"[bold green]{text}[/]" if index in winners else text
            for index, text in enumerate(
                measure.text.format(measure.value(outcome.figures)) for outcome in outcomes
            )
        ]
        name = f"  {measure.name}" if measure.part else measure.name
        table.add_row(escape(name), *cells)
    speeds = [f"{one.figures.requests / one.wall_s:,.0f}" for one in outcomes]
    table.add_row("[dim]simulated requests/s[/]", *[f"[dim]{speed}[/]" for speed in speeds])
    table.add_row("[dim]digest[/]", *[f"[dim]{one.digest[:12]}[/]" for one in outcomes])
    return table


def differences(outcomes: Sequence[SimulationOutcome]) -> dict[str, list[str]]:
    """Return the policy tables that differ between outcomes, with each outcome's policy."""
    tables = outcomes[0].policies
    return {
        table: [outcome.policies[table] for outcome in outcomes]
        for table in tables
        if len({outcome.policies[table] for outcome in outcomes}) > 1
    }


def write_json(outcomes: Sequence[SimulationOutcome], path: str | os.PathLike[str]) -> None:
    """Write everything: figures, distributions, and series over time."""
    Path(path).write_bytes(
        msgspec.json.format(msgspec.json.encode(list(outcomes)), indent=1) + b"\n"
    )
