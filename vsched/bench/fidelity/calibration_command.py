"""Command-line calibration: measuring a cost model and showing it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from vsched.config import Config
    from vsched.sim.cost.model import CostModel, FitError

CALIBRATION_S = 60.0
SecondsOption = Annotated[
    float, typer.Option("--seconds", min=1, help="Approximate measuring time.")
]
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
