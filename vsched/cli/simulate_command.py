"""`vsched simulate`: try configurations on a workload, with the production scheduler on a virtual clock.

`--swarm N` runs whole engines with random faults instead, until one breaks an invariant.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vsched.cli import app
from vsched.errors import ConfigError
from vsched.terminal.options import (
    JsonOption,
    SetOption,
    check_writable,
    load,
    open_output,
    table_console,
)

if TYPE_CHECKING:
    from vsched.config import LoadedConfig
    from vsched.config.sections import PolicyTable
    from vsched.record.replay import EventObserver
    from vsched.sim.cost.model import CostModel
    from vsched.sim.fast.groups import GroupOutage
    from vsched.sim.fast.metrics import SimulationOutcome
    from vsched.sim.fast.recorded import RecordedRun
    from vsched.sim.workload.requests import Workload

REQUESTS, RATE, COST = 2000, 2.0, "h100-7b"
"""Defaults of a generated workload, and of the cost model."""
TargetOption = Annotated[float, typer.Option(min=0, help="Target for goodput.")]
WITH_SWARM = ("swarm", "seed", "faults", "config", "assignments", "probes")
"""Options that apply to `--swarm`."""


@app.command()
def simulate(
    ctx: typer.Context,
    config: Annotated[
        list[Path] | None,
        typer.Option(
            "--config", "-c", help="TOML file; several are compared.", show_default="the defaults"
        ),
    ] = None,
    assignments: SetOption = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Requests to replay: a trace, or a record of `vsched serve --record`."),
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="Generator of requests, by name.", show_default="poisson")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help=f"Number of requests; {REQUESTS} of a generator."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Generated requests per second.", show_default=f"{RATE:g}"),
    ] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="Speed-up factor of arrivals.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the generator and of noise.")] = 0,
    cost: Annotated[
        str | None,
        typer.Option(
            help="Cost model: h100-7b, tiny25, or a JSON file.",
            show_default=f"{COST}; of a record, its steps",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Checkpoint, for its shape.", show_default="the cost model's shape"),
    ] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="KV cache of a replica.", show_default="generate.memory"),
    ] = None,
    ttft_target_ms: TargetOption = 2000.0,
    tpot_target_ms: TargetOption = 100.0,
    outage: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GROUP:FROM_S:TO_S", help="Lose a group for a while; for good without TO_S."
        ),
    ] = None,
    swarm: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Instead, run this many whole engines of random shapes with random faults, from --seed on; "
            "with the policies of --config, if it is given.",
        ),
    ] = None,
    probes: Annotated[
        bool,
        typer.Option(
            "--probes", help="With --swarm, report the number of engines that reached each probe."
        ),
    ] = False,
    faults: Annotated[
        Path | None,
        typer.Option(help="With --swarm, a fault plan instead of random ones: a JSON file."),
    ] = None,
    oracles: Annotated[
        bool, typer.Option("--oracles", help="Check all invariants after every event.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a report with charts as one file."),
    ] = None,
    json: JsonOption = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.")
    ] = None,
) -> None:
    """Simulate configurations on a workload, and compare the results.

    The scheduler and the policies are those of a server; ranks are replaced by a cost model of step
    times.
    """
    if swarm is not None:
        _refuse_without_swarm(ctx)
        run_swarm(
            swarm,
            seed=seed,
            faults=faults,
            configs=config or (),
            assignments=assignments or (),
            probes=probes,
        )
        return
    for option, given in (("--probes", probes), ("--faults", faults)):
        if given:
            raise ConfigError(f"{option}: needs --swarm. Remedy: add --swarm N, or leave it out")
    from vsched.record.files import is_record
    from vsched.sim.cost.model import load_cost_model
    from vsched.sim.fast.metrics import Targets
    from vsched.sim.fast.recorded import load_record
    from vsched.sim.setup import inspect_checkpoint

    files = {"--html": html, "--json": json}
    check_writable({**files, "--timeline": timeline}, inputs=[] if trace is None else [trace])
    if html is not None:
        from vsched.sim.report.rendering import load_jinja

        load_jinja()
    run = load_record(trace) if trace is not None and is_record(trace) else None
    named = _configs(config, assignments, run)
    costs = load_cost_model(cost or COST) if run is None else _cost_of(run, cost)
    load_of = _workload(trace, run, workload, requests=requests, rate=rate, seed=seed, speed=speed)
    info = None if model is None else inspect_checkpoint(next(iter(named.values())).config, model)
    outcomes = _run_all(
        named,
        load_of,
        timeline=timeline,
        cost=costs,
        seed=seed,
        oracles=oracles,
        outages=[_outage(text) for text in outage or ()],
        targets=Targets(ttft_ms=ttft_target_ms, tpot_ms=tpot_target_ms),
        info=info,
        kv_tokens=kv_tokens,
    )
    _say(load_of, outcomes, costs)
    _write(outcomes, files)
    _report_policy_failures(outcomes)


def _refuse_without_swarm(ctx: typer.Context) -> None:
    """Refuse options on the command line that do not apply to `--swarm`."""
    given = [
        f"--{name.replace('_', '-')}"
        for name in ctx.params
        if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"
        and name not in WITH_SWARM
    ]
    if given:
        raise ConfigError(f"{', '.join(given)}: is not used with --swarm. Remedy: leave it out")


def _run_all(
    named: dict[str, LoadedConfig],
    load_of: Workload,
    *,
    timeline: Path | None,
    **settings: Any,
) -> list[SimulationOutcome]:
    """Simulate the configurations one after another, with a progress bar for each."""
    from vsched.sim.fast.simulation import simulate as run
    from vsched.terminal.progress import counting_progress

    outcomes: list[SimulationOutcome] = []
    with counting_progress() as report:
        for label, loaded in named.items():
            with _timeline(timeline, label if len(named) > 1 else "", loaded) as observers:
                given = {"label": label, "observers": observers, **settings}
                progress = partial(lambda label, done: report(label, done, load_of.requests), label)
                outcomes.append(run(loaded, load_of, progress=progress, **given))
    return outcomes


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
    from vsched.config import load_config

    named: dict[str, LoadedConfig] = {}
    every: list[Path | None] = [*(paths or ())]
    if run is not None:
        base = run.config
        named["as recorded"] = load_config(None, environ={}, base=base)
        if assignments and not paths:
            named["changed"] = load_config(None, sets=assignments, environ=os.environ, base=base)
    elif not paths:
        every = [None]
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
        generated = requests or REQUESTS
        found = generate_workload(
            name or "poisson", seed=seed, requests=generated, rate=rate or RATE
        )
    else:
        found = load_trace(trace) if run is None else run.workload
        found = found.first(requests) if requests else found
    return found if speed == 1 else found.faster(speed)


def _outage(text: str) -> GroupOutage:
    from vsched.sim.fast.groups import GroupOutage

    group, _, span = text.partition(":")
    start, _, stop = span.partition(":")
    try:
        at_ns, back_ns = int(float(start) * 1e9), int(float(stop) * 1e9) if stop else None
    except (OverflowError, ValueError):
        at_ns = back_ns = -1
    if at_ns < 0 or (back_ns is not None and back_ns <= at_ns):
        raise ConfigError(
            f"--outage {text}: not GROUP:FROM_S:TO_S. Remedy: write it as generate:60:90, with an end after the "
            "start, or as generate:60 for good"
        )
    duration_ns = None if back_ns is None else back_ns - at_ns
    return GroupOutage(at_ns=at_ns, duration_ns=duration_ns, group=group)


@contextlib.contextmanager
def _timeline(
    path: Path | None, label: str, loaded: LoadedConfig
) -> Iterator[Sequence[EventObserver]]:
    """Write the timeline of a simulation to a file, if one is named; with several configurations, one file each."""
    if path is None:
        yield ()
        return
    from vsched.record import TraceTimeline

    own = path.with_name(f"{path.stem}-{label}{path.suffix}") if label else path
    with open_output("--timeline", own) as file:
        drawn = TraceTimeline(file)
        drawn.see_start(loaded.config)
        yield [drawn]
        drawn.close()


def _say(load_of: Workload, outcomes: Sequence[SimulationOutcome], costs: CostModel) -> None:
    """Print the comparison, with notes for the reader."""
    from vsched.sim.report.comparison import comparison, differences
    from vsched.sim.report.rendering import load_warning

    table_console().print(comparison(outcomes))
    for table, policies in differences(outcomes).items():
        typer.echo(f"{table}: {' | '.join(policies)}")
    for outcome in outcomes:
        if warning := load_warning(outcome):
            typer.echo(f"{outcome.label}: {warning}")
    for note in load_of.notes:
        typer.echo(f"{load_of.name}: {note}")
    if any(outcome.scaled_down for outcome in outcomes):
        counts = ", ".join(f"{one.scaled_down} ({one.label})" for one in outcomes)
        typer.echo(f"images scaled down to the limit: {counts}")
    typer.echo(f"cost model {costs.name}: {costs.source}")


def _report_policy_failures(outcomes: Sequence[SimulationOutcome]) -> None:
    """Print the number of failures of each policy, and the traceback of the first."""
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


def _write(outcomes: Sequence[SimulationOutcome], files: Mapping[str, Path | None]) -> None:
    from vsched.sim.report.comparison import write_json
    from vsched.sim.report.rendering import render_html

    if (page := files["--html"]) is not None:
        page.write_text(render_html(outcomes), encoding="utf-8")
    if (figures := files["--json"]) is not None:
        write_json(outcomes, figures)
    for path in filter(None, files.values()):
        typer.echo(f"wrote {path}")


def run_swarm(
    count: int,
    *,
    seed: int,
    faults: Path | None,
    configs: Sequence[Path] = (),
    assignments: Sequence[str] = (),
    probes: bool = False,
) -> None:
    """Run `count` scenarios; report the results, and the command that reproduces a failure; list `probes` if asked.

    The policies set in the configuration replace the drawn ones; the shapes of the engines are
    still drawn.

    Raises:
        ConfigError: When the plan or the configuration cannot be read, or there are several
            configurations.
        typer.Exit: With status 1, when a scenario failed.
    """
    from vsched.probes import PROBES
    from vsched.sim.cluster.scenario import swarm
    from vsched.terminal.progress import counting_progress

    if len(configs) > 1:
        raise ConfigError.of_limit(
            "--config with --swarm",
            value=f"{len(configs)} files",
            limit="one",
            remedy="give one configuration with the policies to test",
        )
    loaded = load(configs[0] if configs else None, [*assignments])
    policies, unused = _policies_of(loaded)
    words = [
        *(f"--config={path}" for path in configs),
        *(f"--set={one}" for one in assignments),
        *([] if faults is None else [f"--faults={faults}"]),
    ]
    started_s = time.perf_counter()
    with counting_progress() as report:
        outcome = swarm(
            count,
            seed=seed,
            faults=faults,
            policies=policies,
            arguments="".join(f" {shlex.quote(word)}" for word in words),
            on_report=lambda at, _: report("swarm", at - seed + 1, count),
        )
    took_s = time.perf_counter() - started_s
    if unused:
        typer.echo(f"ignored, since the swarm draws the shapes of its engines: {', '.join(unused)}")
    for failure in outcome.failures:
        typer.echo(failure.describe())
    typer.echo(
        f"{outcome.scenarios} scenarios in {took_s:.1f} s, {outcome.virtual_s:.0f} s of virtual time: "
        f"{outcome.requests} requests, {outcome.events} events, {outcome.struck} faults, "
        f"{outcome.losses} groups lost, {len(outcome.failures)} scenarios failed"
    )
    reached = len(outcome.probes) - len(outcome.unreached)
    typer.echo(f"{reached} of {len(outcome.probes)} probes reached")
    if probes:
        for name, scenarios in outcome.probes.items():
            typer.echo(f"| `{name}` | {PROBES[name]} | {scenarios} |")
    if outcome.failures:
        raise typer.Exit(1)


def _policies_of(loaded: LoadedConfig) -> tuple[dict[str, PolicyTable], list[str]]:
    """Return the policy tables that are set explicitly, and all other explicitly set keys."""
    from vsched.config.loading import DEFAULT
    from vsched.config.policies import policy_table
    from vsched.policy import KERNEL_TABLES, SEVERAL

    policies: dict[str, PolicyTable] = {}
    unused: list[str] = []
    for key, origin in loaded.origins.items():
        if origin == DEFAULT:
            continue
        table = next((one for one in (*KERNEL_TABLES, SEVERAL) if key.startswith(f"{one}.")), None)
        if table is None:
            unused.append(key)
        else:
            policies[table] = policy_table(loaded.config, table)
    return policies, unused
