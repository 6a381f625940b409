"""Progress bars of loading: one line a group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def loading_bars(console: Console) -> Iterator[Callable[[str, str, float], None]]:
    """Show a bar for each group that reports progress; yields the callback to report to."""
    columns = (
        TextColumn("{task.fields[group]:>10}"),
        BarColumn(bar_width=30),
        TextColumn("{task.description:<28}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def report(group: str, what: str, fraction: float) -> None:
            if group not in tasks:
                tasks[group] = progress.add_task(what, total=1.0, group=group)
            progress.update(tasks[group], description=what, completed=fraction)

        yield report
