"""What simulations found, side by side: a table for the terminal, CSV and JSON for programs."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.table import Table

from vsched.sim.fast.metrics import SimulationFigures, SimulationOutcome, TimeSpread


class Measure(NamedTuple):
    """A row of the comparison.

    Attributes:
        better: `less` or `more` is better; empty where neither is.
        text: How a value is written.
        hosts: Whether it is of other hosts only, and left out of the table where none has any.
    """

    name: str
    value: Callable[[SimulationFigures], float]
    better: str = ""
    text: str = "{:,.0f}"
    hosts: bool = False


def _spreads() -> list[Measure]:
    def measure(name: str, field: str, quantile: str) -> Measure:
        def value(figures: SimulationFigures) -> float:
            spread: TimeSpread = getattr(figures, field)
            return float(getattr(spread, quantile))

        return Measure(f"{name} {quantile}, ms", value, "less", "{:,.1f}")

    names = {"TTFT": "ttft_ms", "ITL": "itl_ms", "TPOT": "tpot_ms", "end to end": "e2e_ms"}
    return [
        measure(name, field, quantile)
        for name, field in {**names, "in queue": "queue_ms"}.items()
        for quantile in ("p50", "p95", "p99")
    ]


MEASURES = [
    Measure("requests", lambda one: one.requests),
    Measure("finished", lambda one: one.finished, "more"),
    Measure("refused or failed", lambda one: sum(one.failed.values()), "less"),
    *_spreads(),
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
    Measure(
        "to and from hosts, MB", lambda one: one.link_bytes / 1e6, "less", "{:,.1f}", hosts=True
    ),
    Measure("busiest link busy", lambda one: one.link_busy, "", "{:.1%}", hosts=True),
    Measure("simulated time, s", lambda one: one.span_s, "", "{:,.1f}"),
]
"""What is compared, in order."""


def measures_of(outcomes: Sequence[SimulationOutcome]) -> list[Measure]:
    """Return what is compared of these: without rows of other hosts where none has any."""
    hosts = any(one.figures.link_bytes for one in outcomes)
    return [measure for measure in MEASURES if hosts or not measure.hosts]


SAME = 0.005
"""Values that differ by less are as good as each other."""


def best(measure: Measure, outcomes: Sequence[SimulationOutcome]) -> set[int]:
    """Return the outcomes with the best value; none where nothing is better, or all are as good."""
    values = [measure.value(outcome.figures) for outcome in outcomes]
    if not measure.better or len(values) < 2:
        return set()
    wanted = min(values) if measure.better == "less" else max(values)
    margin = SAME * max(abs(wanted), 1e-9)
    found = {index for index, value in enumerate(values) if abs(value - wanted) <= margin}
    return found if len(found) < len(values) else set()


def failures(outcomes: Sequence[SimulationOutcome]) -> list[str]:
    """Return the codes that any of the outcomes has, in order."""
    return sorted({code for outcome in outcomes for code in outcome.figures.failed})


def comparison(outcomes: Sequence[SimulationOutcome]) -> Table:
    """Lay outcomes side by side; the best of a row stands out."""
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
        table.add_row(measure.name, *cells)
        if measure.name == "refused or failed":
            for code in failures(outcomes):
                counts = [f"{outcome.figures.failed.get(code, 0):,}" for outcome in outcomes]
                table.add_row(f"  {code}", *counts)
    for policy in sorted({name for one in outcomes for name in one.figures.policy_faults}):
        counts = [f"{one.figures.policy_faults.get(policy, 0):,}" for one in outcomes]
        table.add_row(f"[red]failures of {policy}[/]", *counts)
    speeds = [f"{one.figures.requests / one.wall_s:,.0f}" for one in outcomes]
    table.add_row("[dim]simulated requests/s[/]", *[f"[dim]{speed}[/]" for speed in speeds])
    table.add_row("[dim]digest[/]", *[f"[dim]{one.digest[:12]}[/]" for one in outcomes])
    return table


def differences(outcomes: Sequence[SimulationOutcome]) -> dict[str, list[str]]:
    """Return the policy tables in which outcomes differ, with each outcome's policy."""
    tables = outcomes[0].policies
    return {
        table: [outcome.policies[table] for outcome in outcomes]
        for table in tables
        if len({outcome.policies[table] for outcome in outcomes}) > 1
    }


def write_csv(outcomes: Sequence[SimulationOutcome], path: str | os.PathLike[str]) -> None:
    """Write one row an outcome, one column a figure; times in milliseconds."""
    codes = failures(outcomes)
    names = [measure.name for measure in MEASURES]
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["label", "workload", "seed", "cost", "digest", *names, *codes])
        for one in outcomes:
            values = [f"{measure.value(one.figures):.6g}" for measure in MEASURES]
            failed = [one.figures.failed.get(code, 0) for code in codes]
            writer.writerow(
                [one.label, one.workload, one.seed, one.cost, one.digest, *values, *failed]
            )


def write_json(outcomes: Sequence[SimulationOutcome], path: str | os.PathLike[str]) -> None:
    """Write everything: figures, distributions, and series over time."""
    Path(path).write_bytes(
        msgspec.json.format(msgspec.json.encode(list(outcomes)), indent=1) + b"\n"
    )


def read_json(path: str | os.PathLike[str]) -> list[SimulationOutcome]:
    """Return what `write_json` wrote."""
    return msgspec.json.decode(Path(path).read_bytes(), type=list[SimulationOutcome])
