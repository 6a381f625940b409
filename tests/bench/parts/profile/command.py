"""`python -m tests.bench.parts profile`: time spent on a served load, by component."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vsched.bench.load.shapes import Case
from vsched.errors import ConfigError
from vsched.terminal.options import (
    ConfigOption,
    JsonOption,
    PlotOption,
    SetOption,
    load,
    new_figure,
    write_json,
)

if TYPE_CHECKING:
    from rich.console import Console

    from tests.bench.parts.profile.measure import Profile, ProfileRow

REQUESTS_EACH = 2
LABELLED_SHARE = 0.05
CASES = (Case.TEXT, Case.IMAGE)


def profile(
    path: Annotated[str, typer.Argument(help="Folder of the checkpoint; model.path.")],
    config: ConfigOption = None,
    assignments: SetOption = None,
    *,
    clients: Annotated[int, typer.Option(min=1, help="Clients at a time.")] = 32,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests; by default two per client.")
    ] = None,
    case: Annotated[Case, typer.Option(help="Contents of requests: text or image.")] = Case.TEXT,
    output_tokens: Annotated[
        int | None, typer.Option(min=2, help="Output tokens per request.")
    ] = None,
    out: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Serve a load and show the cost of each component, next to its lower bound."""
    import uvloop
    from rich.console import Console

    from tests.bench.parts.profile.measure import profile as measure
    from vsched.api.http_server import forgo_models
    from vsched.bench.load.client_processes import LoadOrder
    from vsched.terminal.progress import loading_progress

    if case not in CASES:
        raise ConfigError(f"--case: {case} is not one of {', '.join(CASES)}. Remedy: choose one")
    assignments = [*(assignments or ()), f"model.path={path}", "server.port=0"]
    settings = load(config, assignments).config
    forgo_models(settings)
    order = LoadOrder(
        case=case,
        clients=clients,
        requests=requests or REQUESTS_EACH * clients,
        output_tokens=output_tokens,
    )
    console = Console()
    with (
        loading_progress(console) as report,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        found = runner.run(measure(settings, order, on_progress=report))
    _show(found, console)
    if out is not None:
        write_json(out, found)
        console.print(f"JSON: {out}")
    if plot is not None:
        _plot(found, plot)
        console.print(f"Plot: {plot}")


def _show(found: Profile, console: Console) -> None:
    from rich.table import Table

    title = f"{found.case}, {found.clients} clients: {found.requests_s:.1f} requests/s"
    table = Table(title=title, caption="CPU time in µs; the floor is for a token")
    for name in ("", "component", "a request", "a token", "of a core", "floor", "gap"):
        table.add_column(name, justify="left" if name in {"", "component"} else "right")
    side = ""
    for row in found.rows:
        if side and row.side != side:
            table.add_section()
        shown, side = ("" if row.side == side else row.side), row.side
        table.add_row(
            shown,
            row.component,
            f"{row.request_us:,.0f}",
            f"{row.token_us:,.1f}",
            f"{row.share:.1%}",
            "" if row.floor_us is None else f"{row.floor_us:,.2f}",
            _gap(row),
        )
    console.print(table)
    console.print(
        f"A step took {found.step_ms:.2f} ms, {found.model_ms:.2f} of it the model and its sampling: "
        f"{found.overhead_ms:.2f} ms are not. {found.output_tokens / found.steps:.1f} tokens a step."
    )
    machine = found.machine
    console.print(
        f"One core moves {machine.bytes_s / 1e9:.1f} GB/s, multiplies at {machine.operations_s / 1e9:.0f} "
        f"GFLOP/s and sends a message in {machine.message_s * 1e6:.1f} µs. "
        f"The server has {found.server_resident_bytes / (1 << 20):.0f} MiB resident. "
        f"Other programs kept {found.others:.1f} cores busy.",
        highlight=False,
    )


def _gap(row: ProfileRow) -> str:
    if row.floor_us is None or row.floor_us <= 0 or row.token_us <= 0:
        return ""
    return f"{row.token_us / row.floor_us:,.1f} x"


def _plot(found: Profile, path: Path) -> None:
    """Draw a stacked bar for each side, in µs of CPU time per token."""
    sides = list(dict.fromkeys(row.side for row in found.rows))
    figure = new_figure(10, 1.5 + 1.2 * len(sides))
    axes = figure.subplots()
    widest = max(sum(row.token_us for row in found.rows if row.side == side) for side in sides)
    for place, side in enumerate(sides):
        left = 0.0
        for row in (one for one in found.rows if one.side == side):
            axes.barh(place, row.token_us, left=left, edgecolor="white")
            if row.token_us > LABELLED_SHARE * widest:
                label = f"{row.component}\n{row.token_us:.0f}"
                axes.text(
                    left + row.token_us / 2, place, label, ha="center", va="center", fontsize=7
                )
            left += row.token_us
    axes.set_yticks(range(len(sides)), sides)
    axes.set_xlabel(f"µs of CPU time a token; {found.case}, {found.clients} clients")
    axes.invert_yaxis()
    figure.savefig(path, dpi=110)
