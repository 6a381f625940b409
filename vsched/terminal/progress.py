"""Progress on the terminal: bars of counted work, and of loading a model, which elsewhere is logged."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

logger = logging.getLogger("vsched.loading")
LINE_S = 5.0
"""Minimum time between two lines about the same work of a group."""


@contextlib.contextmanager
def counting_progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a bar for each part of some work; yields the callback (part, count, known total)."""
    columns = (
        TextColumn("{task.description:10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, TaskID] = {}
        shown: dict[str, int] = {}

        def report(part: str, done: int, total: int | None) -> None:
            if part not in tasks:
                tasks[part] = bars.add_task(part, total=total)
            elif total and done < min(shown[part] + total // 200, total):
                return  # an update takes longer than many pieces of work
            shown[part] = done
            bars.update(tasks[part], completed=done)

        yield report


@contextlib.contextmanager
def loading_progress(console: Console) -> Iterator[Callable[[str, str, float], None]]:
    """Show the progress of each group; yields the callback for it."""
    if not console.is_terminal:
        yield LoadingLines()
        return
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


class LoadingLines:
    """Writes progress as log lines: one when a group begins a task, then its share every few seconds."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._last: dict[str, tuple[str, float]] = {}

    def __call__(self, group: str, what: str, fraction: float) -> None:
        """Log a report, unless the last line about the same task is recent."""
        now_s = self._now_s()
        last = self._last.get(group)
        if last is not None and last[0] == what and now_s - last[1] < LINE_S:
            return
        begins = last is None or last[0] != what
        self._last[group] = (what, now_s)
        share = "" if begins or not 0 < fraction < 1 else f" {fraction:.0%}"
        logger.info("%s: %s%s", group, what, share)
