"""Sessions of paired servers: checkpoint, load plan, missing runs in turns, and published tables."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tests.bench.options import IMAGES, PAGES, SMOLLM2, settings_text
from tests.bench.records import Key, Run, Started, Store
from tests.bench.report import page
from tests.bench.servers import sides
from tests.bench.servers.server import Spec
from tests.bench.servers.session import Session
from vsched.bench.load.generator import DECODER_TOKENS, LoadPlan, sessions_for
from vsched.bench.load.shapes import Case, shape_of
from vsched.bench.machine import PROCESSOR

IMAGE_PIXELS = 448
LINE = 118
"""Maximum line length of a page."""


def checkpoint_of(options: argparse.Namespace, console: Console) -> Path:
    """Return the folder of the checkpoint, created if missing."""
    path: Path = options.checkpoints / options.checkpoint
    if not (path / "config.json").exists():
        with console.status(f"making {options.checkpoint}"):
            command = [sys.executable, "-c", sides.ENTRY, "make-checkpoint", str(path)]
            made = ["--smollm2"] if options.checkpoint == SMOLLM2 else ["--size", path.name]
            subprocess.run([*command, *made], check=True)
    return path.resolve()


def session_of(options: argparse.Namespace, console: Console) -> Session:
    """Return the session of a command, including its earlier runs."""
    store = Store(options.out)
    store.report.machine = machine()
    return Session(
        store,
        console,
        checkpoint=options.checkpoint,
        settings=settings_text(options),
        ready_s=options.ready_s,
        idle_s=options.idle_s,
        timeout_s=options.timeout_s,
    )


def machine() -> str:
    """Describe the machine."""
    lines = PROCESSOR.read_text().splitlines() if PROCESSOR.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} cores of {names[0] if names else platform.machine()}"


def plan_of(
    options: argparse.Namespace, case: str, concurrency: int, *, seed: str, purpose: str = "compare"
) -> LoadPlan:
    """Return the plan of a run."""
    kind = Case(case)
    tokens = options.output_tokens
    shape = shape_of(
        kind,
        words=options.words,
        output_tokens=tokens,
        image_pixels=IMAGE_PIXELS,
        turns=options.turns,
    )
    return LoadPlan(
        case=kind,
        shape=shape,
        concurrency=concurrency,
        sessions=sessions_for(kind, concurrency, options.sessions),
        seed=f"{purpose}/{seed}",
        decoder_tokens=DECODER_TOKENS if tokens is None else tokens * 4,
    )


def measure(
    options: argparse.Namespace,
    session: Session,
    specs: tuple[Spec, Spec],
    cases: Sequence[str],
    *,
    purpose: str = "compare",
) -> None:
    """Make the missing runs of two sides."""
    work: dict[tuple[Key, ...], LoadPlan] = {}
    for case in cases:
        for concurrency in options.concurrency:
            for repeat in range(options.repeats):
                plan = plan_of(options, case, concurrency, seed=str(repeat), purpose=purpose)
                keys = tuple(
                    session.key(plan, spec, purpose=purpose, repeat=repeat) for spec in specs
                )
                work[keys] = plan
    missing = session.missing(work, specs)
    session.console.print(f"{len(work) - len(missing)} of {len(work)} pairs are there already")
    if missing:
        with session.servers(specs) as servers:
            session.take_turns(servers, missing)


def starts_here(one: Started, session: Session, names: Sequence[str]) -> bool:
    """Return True if a start belongs to this session."""
    return (one.checkpoint, one.settings) == (
        session.checkpoint,
        session.settings,
    ) and one.side in names


def belongs(run: Run, session: Session, purpose: str) -> bool:
    """Return True if a run was made for this purpose, with this checkpoint and these settings."""
    key = run.key
    found = (key.purpose, key.checkpoint, key.settings)
    return found == (purpose, session.checkpoint, session.settings)


def context_line(machine: str, settings: str, runs: Sequence[Run]) -> str:
    """Describe the machine of some runs, the other load on it, the dates and the versions."""
    others = sorted(run.figures.others for run in runs)
    client = max(run.figures.client_cpu for run in runs)
    waiting = [run.figures.waiting for run in runs if run.figures.waiting is not None]
    waited = f"the server whose turn it was not at most {max(waiting):.2f}; " if waiting else ""
    taken = sorted(run.taken for run in runs)
    versions = ", ".join(sorted({run.version for run in runs}))
    text = (
        f"{machine}; {versions}; {taken[0]} to {taken[-1]}; {settings}. "
        f"Other programs kept {others[len(others) // 2]:.2f} cores busy at the median, {others[-1]:.2f} at most; "
        f"{waited}the client at most {client:.0%} of one."
    )
    return textwrap.fill(text, LINE)


def publish(
    options: argparse.Namespace,
    name: str,
    parts: Sequence[str],
    pictures: dict[str, str],
    console: Console,
) -> None:
    """Write the tables to the folder of runs and, if requested, tables and pictures into the documentation."""
    text = "\n\n".join(parts)
    (options.out / f"{name}.md").write_text(text + "\n")
    console.print(text, markup=False, soft_wrap=True)
    if options.write_docs:
        for file in pictures:
            shutil.copyfile(options.out / file, IMAGES / file)
        shown = [f"![{caption}](../images/{file})" for file, caption in pictures.items()]
        page.write(page.holding(PAGES, name), name, "\n\n".join([*parts, *shown]))
