"""`vsched bench`: measure a server or a part of it; `vsched tune`: find the best use of the cores by measurement."""

from __future__ import annotations

import typer

from vsched.bench.accuracy.command import accuracy
from vsched.bench.cache.command import cache
from vsched.bench.fidelity.command import fidelity
from vsched.bench.front.command import front
from vsched.bench.kernel.command import kernel
from vsched.bench.lag.command import lag
from vsched.bench.load.command import serve
from vsched.bench.memory.command import memory
from vsched.bench.profile.command import profile
from vsched.bench.ranks.command import ranks
from vsched.bench.recovery.command import recovery
from vsched.bench.sampler.command import sampler
from vsched.bench.tune.command import tune
from vsched.cli import app

bench_app = typer.Typer(no_args_is_help=True, help="Measure a server, or a part of one.")
app.add_typer(bench_app, name="bench")
bench_app.command("serve")(serve)
bench_app.command("kernel")(kernel)
bench_app.command("front")(front)
bench_app.command("cache")(cache)
bench_app.command("memory")(memory)
bench_app.command("ranks")(ranks)
bench_app.command("recovery")(recovery)
bench_app.command("sampler")(sampler)
bench_app.command("lag")(lag)
bench_app.command("fidelity")(fidelity)
bench_app.command("profile")(profile)
bench_app.command("accuracy")(accuracy)
app.command("tune")(tune)
