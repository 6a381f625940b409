"""`vsched bench`: the group; its commands register themselves from modules of their own."""

from __future__ import annotations

import typer

from vsched.cli import app

bench_app = typer.Typer(no_args_is_help=True, help="Measure a server, or a part of one.")
app.add_typer(bench_app, name="bench")
