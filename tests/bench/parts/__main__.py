"""The command line of the benchmarks of parts."""

from __future__ import annotations

import typer

from tests.bench.parts.accuracy.command import accuracy
from tests.bench.parts.cache.command import cache
from tests.bench.parts.front.command import front
from tests.bench.parts.kernel.command import kernel
from tests.bench.parts.lag.command import lag
from tests.bench.parts.memory.command import memory
from tests.bench.parts.profile.command import profile
from tests.bench.parts.pruning.command import pruning
from tests.bench.parts.ranks.command import ranks
from tests.bench.parts.recovery.command import recovery
from tests.bench.parts.sampler.command import sampler
from tests.bench.parts.video.command import video
from vsched.cli.main import run
from vsched.logs import configure_logging

app = typer.Typer(no_args_is_help=True, help="Measure a part of vsched.")
for command in (
    accuracy,
    cache,
    front,
    kernel,
    lag,
    memory,
    profile,
    pruning,
    ranks,
    recovery,
    sampler,
    video,
):
    app.command()(command)

if __name__ == "__main__":
    configure_logging("bench")
    run(app)
