"""`vsched bench`: measure a server, or the simulator against one; `vsched tune`: find the best use of the cores."""

from __future__ import annotations

import typer

from vsched.bench.fidelity.command import fidelity
from vsched.bench.load.command import serve
from vsched.bench.tune import tune
from vsched.cli import app

bench_app = typer.Typer(
    no_args_is_help=True, help="Measure a server, or compare it with its simulation."
)
app.add_typer(bench_app, name="bench")
bench_app.command("serve")(serve)
bench_app.command("fidelity")(fidelity)
app.command("tune")(tune)
