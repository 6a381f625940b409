"""`vsched replay`: verify the decisions of a recorded server, and draw its timeline."""

from __future__ import annotations

import contextlib
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vsched.cli import app
from vsched.terminal.options import JsonOption, check_writable, open_output, write_json

if TYPE_CHECKING:
    from vsched.record import ReplayReport


@app.command()
def replay(
    record: Annotated[
        Path, typer.Argument(help="Record written by `vsched serve --record`.", show_default=False)
    ],
    timeline: Annotated[
        Path | None,
        typer.Option(help="Write a trace for ui.perfetto.dev."),
    ] = None,
    unfinished: Annotated[
        bool,
        typer.Option("--unfinished", help="List unfinished requests, as after a kill."),
    ] = False,
    json: JsonOption = None,
) -> None:
    """Replay a record: the scheduler must make the same decisions, byte for byte. Exit status 1 if it does not."""
    from vsched.record import TraceTimeline
    from vsched.record import replay as run
    from vsched.record.files import find_segments
    from vsched.terminal.progress import counting_progress

    outputs = {"--json": json, "--timeline": timeline}
    check_writable(outputs)
    check_writable(outputs, inputs=find_segments(record))
    with contextlib.ExitStack() as open_files:
        drawn = None
        if timeline is not None:
            drawn = TraceTimeline(open_files.enter_context(open_output("--timeline", timeline)))
            open_files.callback(drawn.close)
        bars = open_files.enter_context(counting_progress())
        report = run(record, on_progress=partial(bars, "replaying"), observer=drawn)
    if json is not None:
        write_json(json, report)
    _say(report)
    if unfinished:
        count = len(report.unfinished)
        typer.echo(f"{count} requests without an end:" if count else "Every request has an end.")
        for one in report.unfinished:
            size = f"{one.prompt_tokens} prompt tokens, {one.images} images"
            typer.echo(f"  {one.request_id}  {size}, {one.phase}")
    if drawn is not None:
        typer.echo(f"{timeline}: {drawn.events} trace events; open it at https://ui.perfetto.dev")
    if report.difference is not None:
        raise typer.Exit(1)


def _say(report: ReplayReport) -> None:
    """Print the extent of the replay, and the difference if there is one."""
    typer.echo(
        f"{report.events} events from number {report.first_event} on, {report.span_s:.1f} s in "
        f"{report.segments} segments: {report.requests} requests, {report.commands} commands, "
        f"{report.decisions} decisions"
    )
    if report.dropped_bytes:
        typer.echo(f"{report.dropped_bytes} bytes at the end are an incomplete entry: ignored")
    found = report.difference
    if found is None:
        typer.echo("Everything was decided the same again.")
        return
    place = f" by group {found.group}" if found.group else ""
    typer.echo(
        f"Event {found.number} ({found.segment}, {found.at_s:.6f} s) was answered differently{place}:"
    )
    for name, text in (("event", found.event), ("recorded", found.expected), ("now", found.got)):
        typer.echo(f"  {name:<9} {text}")
    if version("vsched") != report.recorded_with:
        typer.echo(f"It was recorded with vsched {report.recorded_with}.")
