"""The command line of the benchmarks of parts."""

from __future__ import annotations

import typer

from tests.bench.parts.accuracy import accuracy
from tests.bench.parts.front import front
from tests.bench.parts.memory import memory
from tests.bench.parts.pruning import pruning
from tests.bench.parts.recovery import recovery
from tests.bench.parts.video import video
from vsched.cli.main import run
from vsched.logs import configure_logging

app = typer.Typer(no_args_is_help=True, help="Measure a part of vsched.")
for command in (accuracy, front, memory, pruning, recovery, video):
    app.command()(command)

if __name__ == "__main__":
    configure_logging("bench")
    run(app)
