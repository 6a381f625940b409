"""`vsched bench`: measure a server, or a part of one."""

from __future__ import annotations

import typer

from vsched.cli import app
from vsched.cli.bench_accuracy import accuracy
from vsched.cli.bench_cache import cache
from vsched.cli.bench_fidelity import fidelity
from vsched.cli.bench_kernel import kernel
from vsched.cli.bench_memory import memory
from vsched.cli.bench_profile import profile
from vsched.cli.bench_ranks import ranks
from vsched.cli.bench_recovery import recovery
from vsched.cli.bench_serve import serve

bench_app = typer.Typer(no_args_is_help=True, help="Measure a server, or a part of one.")
app.add_typer(bench_app, name="bench")
bench_app.command("serve")(serve)
bench_app.command("kernel")(kernel)
bench_app.command("cache")(cache)
bench_app.command("memory")(memory)
bench_app.command("ranks")(ranks)
bench_app.command("recovery")(recovery)
bench_app.command("fidelity")(fidelity)
bench_app.command("profile")(profile)
bench_app.command("accuracy")(accuracy)
