"""The options of `vsched simulate`, by name; their defaults are in its signature."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

REQUESTS = 2000
"""Requests of a generated workload."""

# What is simulated.
Configs = Annotated[
    list[Path] | None,
    typer.Option(
        "--config", "-c", help="TOML file; several are compared.", show_default="the defaults"
    ),
]
Trace = Annotated[Path | None, typer.Option(help="Requests to replay.", show_default=False)]
Generator = Annotated[
    str | None, typer.Option(help="Generator of requests, by name.", show_default="poisson")
]
Requests = Annotated[
    int | None,
    typer.Option(min=1, help=f"Only so many; of a generator {REQUESTS}.", show_default=False),
]
Rate = Annotated[float, typer.Option(min=0.001, help="Requests a second to generate.")]
Speed = Annotated[float, typer.Option(min=0.001, help="Let them arrive so much faster.")]
Seed = Annotated[int, typer.Option(help="Of the generator, and of noise.")]
Cost = Annotated[str, typer.Option(help="Cost model: h100-7b, tiny25, or a JSON file.")]
Model = Annotated[
    Path | None,
    typer.Option(help="Checkpoint, for its shape.", show_default="the cost model's shape"),
]
KvTokens = Annotated[
    int | None, typer.Option(min=1, help="KV cache of a replica.", show_default="generate.memory")
]

# What goes wrong, and what is checked.
Outages = Annotated[
    list[str] | None,
    typer.Option(metavar="GROUP:FROM_S:TO_S", help="Lose a group for a while; no TO_S for ever."),
]
Swarm = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Instead: so many whole engines of random shapes, with random faults, from --seed on.",
        show_default=False,
    ),
]
Faults = Annotated[
    Path | None,
    typer.Option(
        help="Fault plan, a JSON file; with --swarm instead of random ones.", show_default=False
    ),
]
RestartS = Annotated[float, typer.Option(min=0, help="Until a group that --faults took is back.")]
Oracles = Annotated[bool, typer.Option("--oracles", help="Check everything as it goes.")]
Target = Annotated[float, typer.Option(min=0, help="For goodput.")]

# What is written.
Html = Annotated[
    Path | None, typer.Option(help="Write a report with pictures.", show_default=False)
]
Csv = Annotated[Path | None, typer.Option(help="Write a table.", show_default=False)]
Timeline = Annotated[
    Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.", show_default=False)
]
