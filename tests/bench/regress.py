"""vsched compared with an earlier commit, as ratios within one run."""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from rich.console import Console

from tests.bench.options import sizes_of
from tests.bench.report import plots, tables
from tests.bench.report.ratios import rows
from tests.bench.servers import sides
from tests.bench.servers.server import Spec
from tests.bench.sessions import (
    belongs,
    checkpoint_of,
    context_line,
    measure,
    publish,
    session_of,
    starts_here,
)
from vsched.errors import ConfigError

BEFORE = "before"


def regress(options: argparse.Namespace, console: Console) -> None:
    """Measure in turns, and write tables and plots."""
    commit = resolved(options.before)
    options.before = commit
    checkpoint = checkpoint_of(options, console)
    session = session_of(options, console)
    purpose = f"regress:{commit}"
    earlier = unpacked(commit, options.out / "trees" / commit)
    specs = (
        sides.vsched(checkpoint, sizes_of(options), options.set),
        before_spec(options, checkpoint, earlier, commit),
    )
    if not options.report_only:
        measure(options, session, specs, options.cases, purpose=purpose)
    mine = [run for run in session.store.report.runs if belongs(run, session, purpose)]
    both = [[run for run in mine if run.key.side == side] for side in (sides.VSCHED, BEFORE)]
    pairs = rows(both[0], both[1], options.cases)
    if not pairs:
        return
    names = ("now", commit)
    name = f"regress-{options.checkpoint}"
    file = f"bench-{name}-rates.png"
    plots.draw_rates(pairs, names, f"{options.checkpoint}, now and {commit}", options.out / file)
    found = session.store.report
    started = [one for one in found.starts if starts_here(one, session, (sides.VSCHED, BEFORE))]
    parts = [
        tables.starts(sorted(started, key=lambda one: one.side != sides.VSCHED)),
        tables.rates(pairs, names),
        f"Times in ms, now / {commit} (ratio): medians of the repeats.",
        tables.latencies(pairs),
        context_line(found.machine, session.settings, mine),
    ]
    publish(options, name, parts, {file: "Request rates, now and before"}, console)


def resolved(name: str) -> str:
    """Return the short hash of a commit.

    Raises:
        ConfigError: When there is none.
    """
    command = ["git", "-C", str(sides.ROOT), "rev-parse", "--short=9", f"{name}^{{commit}}"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise ConfigError(f"--before: {name!r} is not a commit. Remedy: name one from git log")
    return found.stdout.strip()


def unpacked(commit: str, folder: Path) -> Path:
    """Return the tree of a commit, unpacked into a folder if it does not exist."""
    if not folder.exists():
        command = ["git", "-C", str(sides.ROOT), "archive", commit, "vsched", "policies", "workers"]
        content = subprocess.run(command, capture_output=True, check=True).stdout
        draft = folder.with_name(f"{folder.name}.draft")
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(draft, filter="data")
        draft.rename(folder)
    return folder.resolve()


def before_spec(options: argparse.Namespace, checkpoint: Path, earlier: Path, commit: str) -> Spec:
    """Return the specification of a server from the earlier tree, in the same environment except for the source path.

    Raises:
        ConfigError: When Python would import another tree.
    """
    assignments = options.set if options.before_set is None else options.before_set
    spec = sides.vsched(checkpoint, sizes_of(options), assignments, side=BEFORE, source=earlier)
    command = [sys.executable, "-c", "import vsched; print(vsched.__file__)"]
    found = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        cwd=earlier,
        env={**os.environ, **spec.environment},
    ).stdout.strip()
    if not Path(found).is_relative_to(earlier):
        message = f"{found} would be measured in place of {commit}"
        raise ConfigError(f"{message}. Remedy: install vsched editable, so that PYTHONPATH leads")
    return dataclasses.replace(spec, version=f"vsched {commit}")
