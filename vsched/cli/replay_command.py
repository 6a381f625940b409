"""`vsched replay`: verify the decisions of a recorded server, and draw its timeline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vsched.cli import app
from vsched.terminal.options import JsonOption, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from vsched.record.replay import Progress, ReplayReport


@app.command()
def replay(
    record: Annotated[
        Path, typer.Argument(help="Record written by `vsched serve --record`.", show_default=False)
    ],
    timeline: Annotated[
        Path | None,
        typer.Option(help="Write a trace for ui.perfetto.dev.", show_default=False),
    ] = None,
    unfinished: Annotated[
        bool,
        typer.Option("--unfinished", help="List unfinished requests, as after a kill."),
    ] = False,
    json: JsonOption = None,
) -> None:
    """Replay a record: the scheduler must make the same decisions, byte for byte. Exit status 1 if it does not."""
    from rich.console import Console

    from vsched.errors import ConfigError
    from vsched.record import TraceTimeline
    from vsched.record import replay as run
    from vsched.record.segments import find_segments

    find_segments(record)  # before anything is overwritten
    console = Console(stderr=True)
    with contextlib.ExitStack() as open_files:
        drawn = None
        if timeline is not None:
            try:
                file = open_files.enter_context(timeline.open("wb"))
            except OSError as error:
                raise ConfigError(
                    f"--timeline {timeline}: cannot be written: {error.strerror}. Remedy: name another file"
                ) from error
            drawn = TraceTimeline(file)
            open_files.callback(drawn.close)
        progress = open_files.enter_context(_bar(console))
        report = run(record, on_progress=progress, observer=drawn)
    if json is not None:
        write_json(json, report)
    _say(report)
    if unfinished:
        _list(report)
    if drawn is not None:
        typer.echo(f"{timeline}: {drawn.events} trace events; open it at https://ui.perfetto.dev")
    if report.difference is not None:
        raise typer.Exit(1)


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[Progress]:
    """Show the progress of a replay; yields the callback for it."""
    from rich.progress import Progress as Bars

    with Bars(console=console, transient=True) as bars:
        task = bars.add_task("replaying", total=None)
        shown = 0

        def report(done: int, total: int) -> None:
            nonlocal shown
            if done - shown >= total // 200:
                shown = done
                bars.update(task, completed=done, total=total)

        yield report


def _list(report: ReplayReport) -> None:
    """Print the unfinished requests, one per line."""
    typer.echo(f"{len(report.unfinished)} requests without an end:")
    for one in report.unfinished:
        typer.echo(
            f"  {one.request_id}  {one.prompt_tokens} prompt tokens, {one.images} images, {one.phase}"
        )


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
