"""`python -m tests.mutants`: mutate the code of loss, put-front, claims and digests, and print surviving mutants.

Each mutant meets the tests, random runs of the kernel and scenarios of the swarm that reach its line, until one fails.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.mutants import report
from tests.mutants.mutate import Mutant, mutants_of
from tests.mutants.places import CHECKS, PLACES
from tests.mutants.trial import Trials, Verdict, with_tests


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only functions whose names contain one of these")
    parser.add_argument("--seconds", type=float, help="seconds after which no mutant is begun")
    parser.add_argument("--sample", type=int, help="number of mutants to try, drawn from the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--results", type=Path, help="a file of verdicts: killed mutants are not tried again"
    )
    parser.add_argument(
        "--checks", nargs="+", default=list(CHECKS), help="the tests that mutants meet"
    )
    parser.add_argument(
        "--table", action="store_true", help="try none; show the content of --results"
    )
    return parser.parse_args(words)


def _load(path: Path | None) -> dict[str, Verdict]:
    if path is None or not path.exists():
        return {}
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return {key: Verdict(*verdict) for key, *verdict in lines}


class Run:
    """One run of the command."""

    def __init__(self, options: argparse.Namespace) -> None:
        words = options.words
        self._places = tuple(
            place for place in PLACES if not words or any(word in place for word in words)
        )
        self.mutants = [one for place in self._places for one in mutants_of(place)]
        self._checks: list[str] = options.checks
        self._results: Path | None = options.results
        self.verdicts = _load(options.results)
        self._deadline_s = time.monotonic() + options.seconds if options.seconds else None
        due = [one for one in self.mutants if self._is_due(one)]
        # Untried ones come first, then survivors.
        due.sort(key=lambda one: one.key in self.verdicts)
        if options.sample is not None:
            due = random.Random(options.seed).sample(due, min(options.sample, len(due)))
        self._due: list[Mutant] = due

    def _is_due(self, mutant: Mutant) -> bool:
        return mutant.key not in self.verdicts or self.verdicts[mutant.key].outcome in report.ALIVE

    def try_all(self) -> None:
        """Try the due mutants within the time limit."""
        with_tests(self._checks, self._try)

    def _try(self, items: Sequence[pytest.Item]) -> None:
        progress = Progress(
            TextColumn("{task.description}"),
            *(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()),
            console=Console(stderr=True),
            auto_refresh=False,  # a refresh thread would hold its locks in a fork for ever
            redirect_stdout=False,
            redirect_stderr=False,
        )
        with progress:
            trials = Trials(items, self._places)
            bar = progress.add_task("tests as they are", total=len(items))
            trials.learn(lambda: progress.update(bar, advance=1, refresh=True))
            bar = progress.add_task("mutants", total=len(self._due))
            alive = 0
            for mutant in self._due:
                if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
                    return
                verdict = trials.judge(mutant)
                self._note(mutant, verdict)
                alive += verdict.outcome in report.ALIVE
                progress.update(
                    bar, advance=1, description=f"mutants, {alive} survive", refresh=True
                )

    def _note(self, mutant: Mutant, verdict: Verdict) -> None:
        self.verdicts[mutant.key] = verdict
        if self._results is not None:
            with self._results.open("a") as file:
                file.write(json.dumps([mutant.key, *verdict]) + "\n")


def main(words: Sequence[str] | None = None) -> int:
    """Try mutants, and print results; 1 if one survives, or is wrongly listed as equivalent."""
    options = _options(words)
    run = Run(options)
    if not options.table:
        run.try_all()
    alive = report.survivors(run.mutants, run.verdicts)
    wrong = report.misjudged(run.mutants, run.verdicts) if not options.words else []
    print(report.table(run.mutants, run.verdicts))
    untried = sum(one.key not in run.verdicts for one in run.mutants)
    if untried:
        print(f"\nnot tried: {untried}")
    if alive:
        print(f"\nsurvivors:\n{report.differences(alive)}")
    if wrong:
        print("\nlisted as equivalent, but killed or gone:", *wrong, sep="\n")
    return 1 if alive or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
