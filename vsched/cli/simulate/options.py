"""Options of `vsched simulate`, by name; their defaults are in its signature."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

REQUESTS = 2000
"""Default number of requests of a generated workload."""

# Input of the simulation.
ConfigsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--config", "-c", help="TOML file; several are compared.", show_default="the defaults"
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        help="Requests to replay: a trace, or a record of `vsched serve --record`.",
        show_default=False,
    ),
]
GeneratorOption = Annotated[
    str | None, typer.Option(help="Generator of requests, by name.", show_default="poisson")
]
RequestsOption = Annotated[
    int | None,
    typer.Option(min=1, help=f"Number of requests; {REQUESTS} of a generator.", show_default=False),
]
RATE = 2.0
RateOption = Annotated[
    float | None,
    typer.Option(min=0.001, help="Generated requests per second.", show_default=f"{RATE:g}"),
]
SpeedOption = Annotated[float, typer.Option(min=0.001, help="Speed-up factor of arrivals.")]
SeedOption = Annotated[int, typer.Option(help="Seed of the generator and of noise.")]
COST = "h100-7b"
CostOption = Annotated[
    str | None,
    typer.Option(
        help="Cost model: h100-7b, tiny25, or a JSON file.",
        show_default=f"{COST}; of a record, its steps",
    ),
]
ModelOption = Annotated[
    Path | None,
    typer.Option(help="Checkpoint, for its shape.", show_default="the cost model's shape"),
]
KvTokensOption = Annotated[
    int | None, typer.Option(min=1, help="KV cache of a replica.", show_default="generate.memory")
]

LinkMbitOption = Annotated[
    float,
    typer.Option(
        min=0.001,
        help="Megabits per second of the link to each host of `cluster`, in each direction.",
    ),
]
LinkLatencyOption = Annotated[
    float, typer.Option(min=0, help="Latency to a host of `cluster`, in milliseconds.")
]

DraftAcceptanceOption = Annotated[
    float,
    typer.Option(
        min=0,
        max=1,
        help="Acceptance probability of a draft token after accepted ones; 0 for no drafting.",
    ),
]
DraftModelTimeOption = Annotated[
    float,
    typer.Option(min=0, help="Time of a draft-model token, as a share of a decode step."),
]

# Faults and checks.
OutagesOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GROUP:FROM_S:TO_S", help="Lose a group for a while; for good without TO_S."
    ),
]
SwarmOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Instead, run this many whole engines of random shapes with random faults, from --seed on; "
        "with the policies of --config, if it is given.",
        show_default=False,
    ),
]
ProbesOption = Annotated[
    bool,
    typer.Option(
        "--probes",
        help="With --swarm, report the number of engines that reached each probe.",
    ),
]
FaultsOption = Annotated[
    Path | None,
    typer.Option(
        help="Fault plan, a JSON file; with --swarm instead of random ones.", show_default=False
    ),
]
RestartSOption = Annotated[
    float,
    typer.Option(min=0, help="Seconds from the loss of a group by --faults until it serves again."),
]
OraclesOption = Annotated[
    bool, typer.Option("--oracles", help="Check all invariants after every event.")
]
TargetOption = Annotated[float, typer.Option(min=0, help="Target for goodput.")]

# Outputs.
HtmlOption = Annotated[
    Path | None, typer.Option(help="Write a report with charts as one file.", show_default=False)
]
CsvOption = Annotated[Path | None, typer.Option(help="Write a table.", show_default=False)]
TimelineOption = Annotated[
    Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.", show_default=False)
]
