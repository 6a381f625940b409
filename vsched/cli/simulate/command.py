"""`vsched simulate`: try configurations on a workload, with the production scheduler on a virtual clock."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vsched.cli import app
from vsched.cli.simulate import options
from vsched.cli.simulate.swarm import run_swarm
from vsched.errors import ConfigError
from vsched.terminal.options import JsonOption, PlotOption, SetOption, load

if TYPE_CHECKING:
    from vsched.config import LoadedConfig
    from vsched.sim.cost.model import CostModel
    from vsched.sim.fast.metrics import SimulationOutcome
    from vsched.sim.fast.recorded import RecordedRun
    from vsched.sim.fast.simulation import EventObserver, OnRequests
    from vsched.sim.faults import FaultPlan, GroupOutage
    from vsched.sim.workload.requests import Workload

PIPE_COLUMNS = 160
WITH_SWARM = ("swarm", "seed", "faults", "config", "assignments", "probes")
"""Options that apply to `--swarm`."""


@app.command()
def simulate(
    ctx: typer.Context,
    config: options.ConfigsOption = None,
    assignments: SetOption = None,
    trace: options.TraceOption = None,
    workload: options.GeneratorOption = None,
    requests: options.RequestsOption = None,
    rate: options.RateOption = None,
    speed: options.SpeedOption = 1.0,
    seed: options.SeedOption = 0,
    cost: options.CostOption = None,
    model: options.ModelOption = None,
    kv_tokens: options.KvTokensOption = None,
    ttft_target_ms: options.TargetOption = 2000.0,
    tpot_target_ms: options.TargetOption = 100.0,
    draft_acceptance: options.DraftAcceptanceOption = 0.0,
    draft_model_time: options.DraftModelTimeOption = 0.2,
    link_mbit: options.LinkMbitOption = 1000.0,
    link_latency_ms: options.LinkLatencyOption = 0.2,
    outage: options.OutagesOption = None,
    swarm: options.SwarmOption = None,
    probes: options.ProbesOption = False,
    faults: options.FaultsOption = None,
    restart_s: options.RestartSOption = 10.0,
    oracles: options.OraclesOption = False,
    html: options.HtmlOption = None,
    csv: options.CsvOption = None,
    json: JsonOption = None,
    plot: PlotOption = None,
    timeline: options.TimelineOption = None,
) -> None:
    """Simulate configurations on a workload, and compare the results.

    The scheduler and the policies are those of a server; ranks are replaced by a cost model of step
    times.
    """
    if swarm is not None:
        _refuse_given(ctx, but=WITH_SWARM, reason="is not used with --swarm")
        run_swarm(
            swarm,
            seed=seed,
            faults=faults,
            configs=config or (),
            assignments=assignments or (),
            probes=probes,
        )
        return
    if probes:
        raise ConfigError("--probes: needs --swarm. Remedy: add --swarm N, or leave it out")
    from vsched.sim.cost.model import load_cost_model
    from vsched.sim.fast.metrics import Targets
    from vsched.sim.network.links import HostLinkProfile
    from vsched.sim.setup import DraftLuck, inspect_checkpoint

    check_writable({"--html": html, "--csv": csv, "--json": json, "--plot": plot})
    run = None if trace is None else _record(trace)
    named = _configs(config, assignments, run)
    costs = load_cost_model(cost or options.COST) if run is None else _cost_of(run, cost)
    load_of = _workload(trace, run, workload, requests=requests, rate=rate, seed=seed, speed=speed)
    info = None if model is None else inspect_checkpoint(next(iter(named.values())).config, model)
    outcomes = _run_all(
        named,
        load_of,
        timeline=timeline,
        cost=costs,
        seed=seed,
        oracles=oracles,
        faults=_faults(outage, faults),
        restart_s=restart_s,
        targets=Targets(ttft_ms=ttft_target_ms, tpot_ms=tpot_target_ms),
        info=info,
        kv_tokens=kv_tokens,
        drafts=DraftLuck(draft_acceptance, draft_model_time),
        host_links=HostLinkProfile(
            latency_ns=int(link_latency_ms * 1e6), bytes_per_s=link_mbit * 125_000
        ),
    )
    _say(load_of, outcomes, costs)
    _write(outcomes, html=html, csv=csv, json=json, plot=plot)
    _report_policy_failures(outcomes)


def _refuse_given(ctx: typer.Context, *, but: Collection[str], reason: str) -> None:
    """Refuse options given on the command line, except those in `but`.

    Raises:
        ConfigError: When there is one; names them all.
    """
    given = [
        f"--{name.replace('_', '-')}"
        for name in ctx.params
        if name not in but and getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise ConfigError(f"{', '.join(given)}: {reason}. Remedy: leave it out")


def check_writable(files: Mapping[str, Path | None]) -> None:
    """Check that output files can be written, before a simulation that may take minutes.

    Raises:
        ConfigError: When one cannot; names its option.
    """
    for option, path in files.items():
        if path is None:
            continue
        target = (
            path if path.exists() else path.parent
        )  # such as /dev/stdout, in a folder that is not writable
        if path.is_dir() or not os.access(target, os.W_OK):
            raise ConfigError(
                f"{option} {path}: cannot be written. Remedy: name a file in an existing, writable folder"
            )


def _run_all(
    named: dict[str, LoadedConfig],
    load_of: Workload,
    *,
    timeline: Path | None,
    **settings: Any,
) -> list[SimulationOutcome]:
    """Simulate the configurations one after another, with a progress bar for each."""
    from vsched.sim.fast.simulation import simulate as run

    outcomes: list[SimulationOutcome] = []
    with _bars(named, load_of) as bars:
        for label, loaded in named.items():
            with _timeline(timeline, label if len(named) > 1 else "", loaded) as observers:
                outcome = run(
                    loaded,
                    load_of,
                    label=label,
                    progress=bars[label],
                    observers=observers,
                    **settings,
                )
            outcomes.append(outcome)
    return outcomes


def _record(trace: Path) -> RecordedRun | None:
    """Read a trace that is a record of a server; None if it is another trace."""
    from vsched.record.frames import is_record
    from vsched.sim.fast.recorded import load_record

    return load_record(trace) if is_record(trace) else None


def _cost_of(run: RecordedRun, cost: str | None) -> CostModel:
    """Return the costs of a recorded run, or those of the option, with the KV cache of the run."""
    import msgspec

    from vsched.sim.cost.model import load_cost_model

    found = run.cost if cost is None else load_cost_model(cost)
    if found is None:
        raise ConfigError(
            "--trace: the record has too few steps to measure their times. Remedy: give --cost"
        )
    return msgspec.structs.replace(found, kv_tokens=run.kv_tokens)


def _configs(
    paths: list[Path] | None, assignments: list[str] | None, run: RecordedRun | None
) -> dict[str, LoadedConfig]:
    """Return the configurations by label: the file name, numbered if it is not unique.

    With a recorded run, its configuration is the first, and without files, the base of the assignments.
    """
    named: dict[str, LoadedConfig] = {}
    every: list[Path | None] = [*paths] if paths else [None]
    if run is not None:
        from vsched.config import load_config

        named["as recorded"] = load_config(None, environ={}, base=run.config)
        if not paths:
            if assignments:
                named["changed"] = load_config(
                    None, sets=assignments, environ=os.environ, base=run.config
                )
            return named
    for path in every:
        label = wanted = "defaults" if path is None else path.stem
        number = 1
        while label in named:
            number += 1
            label = f"{wanted}-{number}"
        named[label] = load(path, assignments)
    return named


def _workload(
    trace: Path | None,
    run: RecordedRun | None,
    name: str | None,
    *,
    requests: int | None,
    rate: float | None,
    seed: int,
    speed: float,
) -> Workload:
    from vsched.sim.workload.generators import generate_workload
    from vsched.sim.workload.traces import load_trace

    if trace is not None and name is not None:
        raise ConfigError("--trace and --workload: give one of them")
    if trace is not None and rate is not None:
        raise ConfigError(
            "--trace and --rate: a trace has its own arrivals; scale them with --speed"
        )
    if trace is None:
        generated = requests or options.REQUESTS
        found = generate_workload(
            name or "poisson", seed=seed, requests=generated, rate=rate or options.RATE
        )
    else:
        found = load_trace(trace) if run is None else run.workload
        found = found.first(requests) if requests else found
    return found if speed == 1 else found.faster(speed)


def _faults(outages: Sequence[str] | None, faults: Path | None) -> FaultPlan:
    """Return the fault plan, if any, with the outages added."""
    from vsched.sim.faults import FaultPlan

    plan = FaultPlan() if faults is None else FaultPlan.load(faults)
    named = (_outage(text) for text in outages or ())
    return FaultPlan(seed=plan.seed, faults=(*named, *plan.faults))


def _outage(text: str) -> GroupOutage:
    from vsched.sim.faults import GroupOutage

    group, _, span = text.partition(":")
    start, _, stop = span.partition(":")
    try:
        at_ns, back_ns = int(float(start) * 1e9), int(float(stop) * 1e9) if stop else None
    except ValueError:
        raise ConfigError(f"--outage {text}: not GROUP:FROM_S:TO_S, as in generate:60:90") from None
    duration_ns = None if back_ns is None else max(back_ns - at_ns, 0)
    return GroupOutage(at_ns=at_ns, duration_ns=duration_ns, group=group)


@contextlib.contextmanager
def _bars(names: Iterable[str], load_of: Workload) -> Iterator[dict[str, OnRequests]]:
    """Show a bar for each configuration; yields its progress callback, which takes the number of ended requests."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:

        def reporter(label: str) -> OnRequests:
            task = bars.add_task(label, total=load_of.requests, start=False)

            def report(done: int) -> None:
                bars.start_task(task)
                bars.update(task, completed=done)

            return report

        yield {label: reporter(label) for label in names}


@contextlib.contextmanager
def _timeline(
    path: Path | None, label: str, loaded: LoadedConfig
) -> Iterator[Sequence[EventObserver]]:
    """Write the timeline of a simulation to a file, if one is named; with several configurations, one file each."""
    if path is None:
        yield ()
        return
    from vsched.record import TraceTimeline
    from vsched.sim.fast.simulation import header_of

    own = path.with_name(f"{path.stem}-{label}{path.suffix}") if label else path
    try:
        file = own.open("wb")
    except OSError as error:
        raise ConfigError(
            f"--timeline {own}: cannot be written: {error.strerror}. Remedy: name another file"
        ) from error
    with file:
        drawn = TraceTimeline(file)
        drawn.begin(header_of(loaded.config), loaded.config)
        yield [drawn]
        drawn.close()


def _say(load_of: Workload, outcomes: Sequence[SimulationOutcome], costs: CostModel) -> None:
    """Print the comparison, with notes for the reader."""
    from rich.console import Console

    from vsched.sim.report.comparison import comparison, differences
    from vsched.sim.report.rendering import load_warning

    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_COLUMNS)
    console.print(comparison(outcomes))
    for table, policies in differences(outcomes).items():
        console.print(f"{table}: {' | '.join(policies)}", markup=False, highlight=False)
    for outcome in outcomes:
        if warning := load_warning(outcome):
            console.print(f"{outcome.label}: {warning}", markup=False, highlight=False)
    for note in load_of.notes:
        console.print(f"{load_of.name}: {note}", markup=False, highlight=False)
    if any(outcome.scaled_down for outcome in outcomes):
        counts = ", ".join(f"{one.scaled_down} ({one.label})" for one in outcomes)
        console.print(f"images scaled down to the limit: {counts}", markup=False, highlight=False)
    console.print(f"cost model {costs.name}: {costs.source}", style="dim", markup=False)


def _report_policy_failures(outcomes: Sequence[SimulationOutcome]) -> None:
    """Print the number of failures of each policy, and the traceback of the first.

    Raises:
        typer.Exit: With status 1, if a policy failed: a default decided instead.
    """
    for outcome in outcomes:
        for policy, count in outcome.figures.policy_faults.items():
            failures = outcome.policy_failures.items()
            failure = "".join(text for name, text in failures if name.split(",")[0] == policy)
            typer.echo(
                f"{failure}error: {outcome.label}: {policy} failed {count:,} times, and the default decided "
                "in its place. Remedy: fix the policy; see the traceback of its first failure above.",
                err=True,
            )
    if any(outcome.figures.policy_faults for outcome in outcomes):
        raise typer.Exit(1)


def _write(
    outcomes: Sequence[SimulationOutcome],
    *,
    html: Path | None,
    csv: Path | None,
    json: Path | None,
    plot: Path | None,
) -> None:
    from vsched.sim.report.comparison import write_csv, write_json
    from vsched.sim.report.rendering import render_html, write_png

    if html is not None:
        html.write_text(render_html(outcomes), encoding="utf-8")
    if csv is not None:
        write_csv(outcomes, csv)
    if json is not None:
        write_json(outcomes, json)
    if plot is not None:
        write_png(outcomes, plot)
    for path in (html, csv, json, plot):
        if path is not None:
            typer.echo(f"wrote {path}")
