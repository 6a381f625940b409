"""`python -m tests.limits`: start the real engine under each limit of memory, and send a request with an image.

Each start has to end in an answer, or in one clear error that names the setting with which to raise that limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.limits.attempt import Case, Outcome, Stage
from tests.limits.report import failures, table
from tests.limits.worker import Worker

WAYS = ("forked", "new")


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.limits", description=__doc__)
    parser.add_argument("--from", dest="first", type=int, default=50, help="the first limit, MiB")
    parser.add_argument("--to", dest="last", type=int, default=2000, help="the last one, MiB")
    parser.add_argument("--step", type=int, default=10, help="MiB")
    parser.add_argument("--stage", nargs="+", choices=get_args(Stage), default=get_args(Stage))
    parser.add_argument(
        "--ranks", nargs="+", choices=WAYS, default=WAYS, help="forked, or new processes"
    )
    parser.add_argument(
        "--served", type=int, default=5, help="stop after this number of served starts in a row"
    )
    parser.add_argument(
        "--results", type=Path, help="a file of outcomes: good ones are not tried again"
    )
    parser.add_argument("--table", type=Path, help="file to write the table to")
    return parser.parse_args(words)


class Outcomes(dict[Case, Outcome]):
    """Outcomes by case, also in a file from which a later run resumes."""

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self._path = path
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                case, outcome = json.loads(line)
                self[Case(*case)] = Outcome(*outcome)

    def note(self, case: Case, outcome: Outcome) -> None:
        """Add one."""
        self[case] = outcome
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps([case, outcome]) + "\n")


def _sweep(
    cases: Sequence[Case], outcomes: Outcomes, worker: Worker, *, served_max: int
) -> Iterator[Case]:
    """Try cases until `served_max` in a row were served; yield each when it is done."""
    served = 0
    for case in cases:
        if case not in outcomes or case in failures(outcomes):
            outcomes.note(case, worker.attempt(case))
        yield case
        served = served + 1 if outcomes[case].verdict == "served" else 0
        if served >= served_max:
            return


def main(words: Sequence[str] | None = None) -> int:
    """Try all limits and print the outcomes; 1 if one was neither served nor reported clearly."""
    options = _options(words)
    limits = range(options.first, options.last + 1, options.step)
    outcomes = Outcomes(options.results)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(TextColumn("{task.description}"), *columns, console=console) as progress,
    ):
        worker = Worker(Path(folder))
        for way in options.ranks:
            for stage in options.stage:
                cases = [Case(stage, way == "forked", limit) for limit in limits]
                bar = progress.add_task(f"{stage}, {way}", total=len(cases))
                for case in _sweep(cases, outcomes, worker, served_max=options.served):
                    said = f"{stage}, {way}: {case.limit_mib} MiB {outcomes[case].verdict}"
                    progress.update(bar, advance=1, description=said)
                progress.update(bar, total=progress.tasks[bar].completed)
        worker.close()
    shown = table(outcomes)
    print(shown)
    if options.table is not None:
        options.table.write_text(f"{shown}\n")
    bad = failures(outcomes)
    for case, outcome in bad.items():
        print(f"\n{case.stage}, {case.limit_mib} MiB: {outcome.verdict}\n{outcome.message}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
