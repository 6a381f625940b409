"""`vsched bench fidelity`: compare simulations with the real engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vsched.errors import ConfigError
from vsched.terminal.options import (
    CheckpointArgument,
    ConfigOption,
    JsonOption,
    SetOption,
    check_writable,
    load_measured,
    write_json,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from vsched.bench.fidelity.measure import Run
    from vsched.config import Config
    from vsched.sim.cost.model import CostModel, FitError
    from vsched.sim.workload.requests import Workload


CALIBRATION_S = 60.0
REFRESH_HZ = 2
"""Low, because bars take time from the measured engine."""
NOISY_OTHERS = 0.2
"""Cores kept busy by other programs above which figures are not reliable."""


def run_calibration_here(settings: Config, console: Console, seconds: float) -> CostModel:
    """Start an engine, measure it with progress bars, and return its cost model."""
    import uvloop
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from vsched.bench.fidelity.calibration import run_calibration

    columns = (
        TextColumn("{task.description:<40}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=REFRESH_HZ
    ) as progress:
        task = progress.add_task("starting", total=None)
        return uvloop.run(
            run_calibration(
                settings,
                seconds=seconds,
                on_progress=lambda group, what, _: progress.update(
                    task, description=f"{group}: {what}"
                ),
                advanced=lambda done, of: progress.update(
                    task, description="measuring", completed=done, total=of
                ),
            )
        )


def show_costs(model: CostModel, console: Console) -> None:
    """Print the costs and the errors of the fit."""
    from rich.table import Table

    encode, generate, host = model.encode, model.generate, model.host
    table = Table(title=f"{model.name}: {model.source}")
    for name in ("part", "cost", "of", "off by, p50 / p95"):
        table.add_column(name, justify="right" if name == "cost" else "left")
    rows = (
        ("encode", encode.step_ns / 1e6, "ms a step", model.encode_error),
        ("", encode.item_ns / 1e6, "ms an image", None),
        ("", encode.token_ns / 1e3, "µs a token", None),
        ("", encode.token_pair_ns, "ns a pair of tokens", None),
        ("generate", generate.step_ns / 1e6, "ms a step", model.generate_error),
        ("", generate.decode_ns / 1e3, "µs a request that decodes", None),
        ("", generate.context_ns, "ns a token of its context", None),
        ("", generate.prefill_ns / 1e3, "µs a prompt token", None),
        ("", generate.pair_ns, "ns a pair of prompt tokens", None),
        ("prepare", host.request_ns / 1e6, "ms a request", model.prepare_error),
        ("", host.token_ns, "ns a token", None),
        ("", host.image_ns / 1e6, "ms an image", None),
        ("", host.pixel_ns, "ns a pixel", None),
        ("engine", host.decision_ns / 1e6, "ms a decision to idle ranks", None),
        ("", host.gap_ns / 1e6, "ms between two steps", None),
    )
    for part, cost, unit, error in rows:
        table.add_row(part, f"{cost:.3g}", unit, _off(error))
    console.print(table)
    for count, slowdown in enumerate(model.host.contention[1:], 2):
        console.print(f"{count} busy processes: slowdown {slowdown:.2f}")
    console.print(f"steps of one kind differ by {100 * model.noise:.1f} % (standard deviation)")
    machine = model.machine
    if machine is not None and machine.others > NOISY_OTHERS:
        console.print(
            f"[yellow]Other programs kept {machine.others:.1f} of {machine.cores} cores busy meanwhile: "
            "repeat the measurement on an idle machine."
        )


def _off(error: FitError | None) -> str:
    if error is None:
        return ""
    return f"{100 * error.median:.0f} % / {100 * error.p95:.0f} % of {error.samples}"


FLOOD_S = 20.0
"""Approximate seconds of the measurement of the capacity."""
GENERATED = 20_000
"""More requests than any run sends."""
PIPE_COLUMNS = 140


def fidelity(
    path: CheckpointArgument,
    config: ConfigOption = None,
    assignments: SetOption = None,
    cost: Annotated[
        Path | None,
        typer.Option(help="Cost model of the checkpoint.", show_default="measured first"),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Requests to send.")] = None,
    loads: Annotated[
        str, typer.Option(help="Loads as shares of the measured capacity, separated by commas.")
    ] = "0.3,0.6,0.9",
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of each load.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Seed of the generator and of noise.")] = 0,
    out: JsonOption = None,
) -> None:
    """Serve a workload and simulate it; compare TTFT, TPOT and throughput."""
    import uvloop
    from rich.console import Console

    from vsched.bench.fidelity.measure import small_requests
    from vsched.sim.cost.model import load_cost_model
    from vsched.sim.workload.traces import load_trace

    check_writable({"--json": out})
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_COLUMNS)
    levels = _numbers("--loads", loads)
    settings = load_measured(config, assignments, path)
    requests = small_requests(seed, GENERATED) if trace is None else load_trace(trace)
    if cost is None:
        costs = run_calibration_here(settings, console, CALIBRATION_S)
        show_costs(costs, console)
    else:
        costs = load_cost_model(str(cost))
    runs = uvloop.run(
        _measure(settings, requests, costs, console, levels=levels, seconds=seconds, seed=seed)
    )
    _show(runs, requests.name, console)
    if out is not None:
        write_json(out, {"workload": requests.name, "seed": seed, "cost": costs, "runs": runs})
        console.print(f"JSON: {out}")


def _numbers(option: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < one < math.inf for one in numbers):
        raise ConfigError(
            f"{option} {text}: not a list of positive numbers. Remedy: give one such as 1,2.5"
        )
    return numbers


async def _measure(
    settings: Config,
    requests: Workload,
    costs: CostModel,
    console: Console,
    *,
    levels: Sequence[float],
    seconds: float,
    seed: int,
) -> list[Run]:
    from rich.progress import Progress

    from vsched.bench.fidelity.measure import FLOOD, Comparison, ObservedEngine, at_rate

    runs: list[Run] = []
    with Progress(console=console, transient=True, refresh_per_second=REFRESH_HZ) as progress:
        task = progress.add_task("starting", total=None)

        def begin(what: str, load_of: Workload) -> None:
            progress.reset(task, description=what, total=load_of.requests)

        async with ObservedEngine(settings) as engine:
            comparison = Comparison(engine, costs, seed=seed)
            await comparison.warm_up(requests)
            flood = comparison.flood_of(requests, FLOOD_S)
            begin("all at once", flood)
            runs.append(
                await comparison.compare_workload(flood, FLOOD, lambda: progress.advance(task))
            )
            capacity = runs[0].real.requests_s
            for level in levels:
                load_of = at_rate(requests, level * capacity, seconds)
                begin(f"{level * capacity:.2f} requests/s", load_of)
                runs.append(
                    await comparison.compare_workload(
                        load_of, level, lambda: progress.advance(task)
                    )
                )
    return runs


def _show(runs: Sequence[Run], name: str, console: Console) -> None:
    console.print(_table(f"{name}: real / simulated (error)", runs, adjusted=False))
    console.print(
        _table("the same, simulated with the speed that the machine had then", runs, adjusted=True)
    )
    for run in runs:
        if run.real.failed or run.simulated.failed:
            console.print(f"{_label(run)}: failed {run.real.failed} / {run.simulated.failed}")


def _table(title: str, runs: Sequence[Run], *, adjusted: bool) -> Table:
    from rich.table import Table

    from vsched.bench.fidelity.measure import LIMITS

    table = Table(title=f"{title}; red if the error exceeds its limit")
    about = ("encode", "generate") if adjusted else ("requests", "others")
    for column in ("load", *about, *HEADINGS.values()):
        table.add_column(column, justify="right")
    for run in runs:
        side = run.adjusted if adjusted else run.simulated
        cells = []
        for figure, error in run.errors(side).items():
            colour = "red" if abs(error) > LIMITS[figure] else "green"
            real, simulated = _shown(getattr(run.real, figure)), _shown(getattr(side, figure))
            cells.append(f"{real} / {simulated} [{colour}]({100 * error:+.0f}%)")
        reported = (
            [f"{run.slowness[stage]:.2f} x" for stage in about]
            if adjusted
            else [str(run.requests), f"{run.others:.2f}"]
        )
        table.add_row(_label(run), *reported, *cells)
    return table


def _shown(value: float) -> str:
    return f"{value:.0f}" if value >= TELLING else f"{value:.3g}"


TELLING = 100
"""Larger values are shown without decimals."""
HEADINGS = {
    "ttft_p50": "TTFT p50, ms",
    "ttft_p95": "TTFT p95, ms",
    "tpot_p50": "TPOT p50, ms",
    "tpot_p95": "TPOT p95, ms",
    "requests_s": "requests/s",
}


def _label(run: Run) -> str:
    return "all at once" if run.is_flood else f"{100 * run.load:.0f} %"
