"""The report of `vsched policies try`, on a terminal or as an HTML page."""

from __future__ import annotations

import html
import io
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.text import Text

from vsched.config import toml_value
from vsched.config.sections import PoliciesConfig
from vsched.policy import POLICY_TABLES, SEVERAL
from vsched.sim.fast.metrics import SimulationOutcome, TenantFigures
from vsched.sim.gallery import COST, TARGETS
from vsched.sim.report.rendering import ReportPage
from vsched.terminal.options import new_table
from vsched.testing.policy_trial import CaseTrial, PolicyTrial, SeatCalls

HTML_COLUMNS = 150
NOTABLE = 0.05
"""Relative difference from the default that is coloured."""
LIMITS = PoliciesConfig()
SLOW = "its calls are slow"


def write_html(trial: PolicyTrial, target: str, path: Path) -> None:
    """Write the report, and that of each case of the gallery with charts, as one HTML file that loads nothing."""
    console = Console(record=True, width=HTML_COLUMNS, file=io.StringIO())
    console.print(report(trial, target))
    page = (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(target)}</title>\n"
        "<style>{stylesheet} body {{ color: {foreground}; background: {background}; font-family: sans-serif }}\n"
        "pre {{ overflow-x: auto }} summary {{ padding: 0.3rem 0 }}</style>\n"
        '<body><pre style="font-family: monospace"><code>{code}</code></pre>\n<h2>Charts</h2>\n'
    )
    parts = [console.export_html(code_format=page)]
    for each in trial.cases:
        title, frame = html.escape(each.case.title), ReportPage(each.outcomes).frame()
        parts.append(f"<details><summary>{title}</summary>{frame}</details>\n")
    path.write_text("".join([*parts, "</body>\n</html>\n"]), encoding="utf-8")


def report(trial: PolicyTrial, target: str) -> RenderableType:
    """Return the report: contract, swarm, cases of the gallery, calls, problems, and how to deploy it."""
    parts: list[RenderableType] = [
        Text(f"{target}, at {', '.join(trial.tables)}", style="bold"),
        *_contract(trial, target),
        *_swarm(trial),
    ]
    if trial.cases:
        parts += [
            Text(
                f"\nGallery: small workloads on one GPU, simulated (cost model {COST}). In brackets: the change from "
                f"the default policies; green is better by {NOTABLE:.0%}, red worse. Within targets: first token in "
                f"{TARGETS.ttft_ms:,.0f} ms or the request's own target, {TARGETS.tpot_ms:.0f} ms per token."
            ),
            *(_case(case, trial) for case in trial.cases),
            _seats(trial),
        ]
    if trial.problem is None and not trial.failures:  # else they have the traceback
        parts += [Text(text, style="red") for text in trial.tracebacks.values()]
    harmful = _harmful(trial)
    parts += [Text(f"- {line}") for line in [*_without_calls(trial), *_overruled(trial), *harmful]]
    parts += [*_verdict(trial, target, [*dict.fromkeys(harmful.values())])]
    return Group(*parts)


def _contract(trial: PolicyTrial, target: str) -> Iterator[RenderableType]:
    if trial.problem is None:
        yield Text(
            f"Contract: passed. {trial.schedules} random schedules with cancellations and failures; every call made "
            "twice.",
            style="green",
        )
        return
    name = target.partition(":")[2] or target
    if trial.fields:
        name += f"({', '.join(f'{key}={value!r}' for key, value in trial.fields.items())})"
    yield Text(f"Contract: FAILED. {trial.problem}", style="bold red")
    yield Text("\n".join(getattr(trial.problem, "__notes__", ())), style="red")
    yield Text(f"In a test: vsched.testing.check_policy({name}, seeds=[{trial.schedules - 1}])")


def _swarm(trial: PolicyTrial) -> Iterator[RenderableType]:
    if trial.scenarios and not trial.failures:
        yield Text(
            f"Swarm: passed. {trial.scenarios} simulated engines of random shapes with random faults.",
            style="green",
        )
    for failure in trial.failures:
        yield Text(f"Swarm: FAILED. {failure.describe()}", style="red")


def _case(case: CaseTrial, trial: PolicyTrial) -> RenderableType:
    table = new_table(
        f"\n{case.case.title}",
        *("policy", "tenant", "finished", "tokens/s", "TTFT p50, ms", "TTFT p95, ms"),
        *("longest wait, ms", "in targets"),
        texts=("policy", "tenant"),
        title_style="bold",
    )
    first = case.outcomes[0]
    for outcome in case.outcomes:
        own = outcome.label == trial.label
        for tenant in case.case.shown:
            shown = outcome.label if tenant == case.case.shown[0] else ""
            cells = _cells(outcome, first, tenant)
            table.add_row(escape(shown), tenant, *cells, style="bold" if own else "")
        if own:
            table.add_section()
    if case.too_slow:
        table.add_row(trial.label, "[red]too slow: stopped[/]")
    return table


def _cells(outcome: SimulationOutcome, first: SimulationOutcome, tenant: str) -> Iterator[str]:
    now, before = outcome.figures.tenants[tenant], first.figures.tenants[tenant]

    def tokens_s(figures: TenantFigures, of: SimulationOutcome) -> float:
        return figures.output_tokens / of.figures.span_s

    yield f"{now.finished:,} of {now.requests:,}"
    yield _compared(tokens_s(now, outcome), tokens_s(before, first), better="more")
    yield _compared(now.ttft_ms.p50, before.ttft_ms.p50)
    yield _compared(now.ttft_ms.p95, before.ttft_ms.p95)
    yield _compared(now.ttft_max_ms, before.ttft_max_ms)
    share = f"{now.good_share:.0%}"
    change = now.good_share - before.good_share
    yield f"[{'green' if change > 0 else 'red'}]{share}[/]" if abs(change) >= NOTABLE else share


def _compared(value: float, default: float, *, better: str = "less") -> str:
    """Return a value with its change from the default, unless that rounds to nothing."""
    change = value / default - 1 if default else 0.0
    if abs(change) < 0.005:
        return f"{value:,.0f}"
    text = f"{value:,.0f} ({change:+.0%})"
    if abs(change) < NOTABLE:
        return text
    return f"[{'green' if (change > 0) == (better == 'more') else 'red'}]{text}[/]"


def _seats(trial: PolicyTrial) -> RenderableType:
    columns = ("table", "calls", "µs per call", "slowest, ms", "failed", "overruled")
    title = f"\nTimed calls of {trial.label} in the gallery"
    table = new_table(title, *columns, texts=("table",))
    for path, seat in trial.seats.items():
        failed = f"[bold red]{seat.failed:,}[/]" if seat.failed else "0"
        overruled = f"{sum(seat.overruled.values()):,}"
        mean_us = f"{_mean_us(seat):,.1f}"
        table.add_row(
            path, f"{seat.calls:,}", mean_us, f"{seat.longest_ns / 1e6:,.1f}", failed, overruled
        )
    return table


def _mean_us(seat: SeatCalls) -> float:
    return seat.total_ns / max(seat.calls, 1) / 1e3


def _overruled(trial: PolicyTrial) -> list[str]:
    """Return a sentence for each reason for which valid answers were overruled."""
    return [
        f"{path}: {count:,} answers overruled: {reason}"
        for path, seat in trial.seats.items()
        for reason, count in seat.overruled.items()
    ]


def _without_calls(trial: PolicyTrial) -> list[str]:
    """Return a sentence for each table of which no call was timed."""
    return [
        f"{path}: calls are not timed"
        if POLICY_TABLES[path] == "eviction"
        else f"{path}: these cases never called it, so they show nothing about it"
        for path, seat in trial.seats.items()
        if not seat.calls
    ]


def _harmful(trial: PolicyTrial) -> dict[str, str]:
    """Return sentences about slow calls, and requests that were passed over for long; each with a clause for it."""
    lines = {}
    for path, seat in trial.seats.items():
        budget_ms = LIMITS.call_budget_ms
        if _mean_us(seat) > budget_ms * 1e3:
            sentence = (
                f"{path}: calls take {_mean_us(seat) / 1e3:,.0f} ms; a server replaces a policy by the default after "
                f"{LIMITS.slow_calls_max + 1} of 100 calls over {budget_ms:g} ms (policies.call_budget_ms)"
            )
            lines[sentence] = SLOW
    if any(case.too_slow for case in trial.cases):
        sentence = (
            "Its calls take so long that cases of the gallery were stopped. Every call delays all "
            "requests: a fast policy takes microseconds"
        )
        lines[sentence] = SLOW
    passed = [one.figures.passed_over_s for case in trial.cases for one in case.outcomes[1:2]]
    passed_s = max([*passed, 0.0, trial.report.passed_over_s if trial.report else 0.0])
    limit_s = LIMITS.passed_over_max_s
    if passed_s > limit_s / 2:
        sentence = (
            f"It lets others pass a request for {passed_s:,.0f} s; after {limit_s:g} s "
            "(policies.passed_over_max_s) the kernel puts that request first"
        )
        lines[sentence] = f"it lets requests wait for {passed_s:,.0f} s"
    return lines


def _verdict(trial: PolicyTrial, target: str, noticed: list[str]) -> Iterator[RenderableType]:
    if not trial.passed:
        yield Text("\nFAILED: mend the problems in red first.", style="bold red")
        return
    if noticed:
        text = f"No check failed, but {' and '.join(noticed)}. To deploy it nevertheless:"
        yield Text(f"\n{text}", style="bold yellow")
    else:
        yield Text("\nNothing failed. To deploy it:", style="bold green")
    several = len(trial.tables) > 1
    yield Text(f'  [{SEVERAL if several else trial.tables[0]}]\n  use = "{target}"')
    if several:
        yield Text(f"  seats = {toml_value(trial.tables)}")
    for key, value in trial.fields.items():
        yield Text(f"  {key} = {toml_value(value)}")
