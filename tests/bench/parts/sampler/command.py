"""`python -m tests.bench.parts sampler`: sampling cost by sampling parameters."""

from __future__ import annotations

import functools
import os
from typing import Annotated

import typer

from vsched.terminal.options import JsonOption, write_json


def sampler(
    vocabulary: Annotated[int, typer.Option(min=2, help="Logits per row.")] = 152_064,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats; the cases take turns.")] = 11,
    dtype: Annotated[str, typer.Option(help="Type of the logits: bfloat16 or float32.")] = (
        "bfloat16"
    ),
    out: JsonOption = None,
) -> None:
    """Measure milliseconds of CPU time per step for sampling, on one core, for 1, 8 and 64 rows."""
    from rich.console import Console
    from rich.table import Table

    from tests.bench.parts.sampler.measure import measure_sampler
    from vsched.checkpoint_tools import load_tools
    from vsched.errors import ConfigError

    plugin = load_tools("transformers", "checkpoint_sizes")
    if dtype not in {"bfloat16", "float32"}:
        raise ConfigError(f"--dtype: {dtype!r} is neither bfloat16 nor float32")
    rows = measure_sampler(
        functools.partial(plugin.sampler, dtype=dtype),
        vocabulary=vocabulary,
        rows=(1, 8, 64),
        repeats=repeats,
    )
    table = Table(title=f"Choosing tokens of {vocabulary:,}, {dtype}, ms of CPU time a step")
    for name in ("logits", "rows", "asked", "p50", "spread"):
        table.add_column(name, justify="left" if name in {"logits", "asked"} else "right")
    for row in rows:
        low, high = row.spread_ms
        table.add_row(
            *(row.logits, str(row.rows), row.requested, f"{row.step_ms:.2f}"),
            f"{low:.2f}-{high:.2f}",
        )
    Console().print(table)
    if out is not None:
        write_json(out, {"load": os.getloadavg()[0], "rows": rows})
