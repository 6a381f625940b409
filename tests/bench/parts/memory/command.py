"""`python -m tests.bench.parts memory`: the profiled KV cache size compared with a fixed fraction."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vsched.terminal.options import JsonOption, PlotOption, SetOption, new_figure, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from tests.bench.parts.memory.measure import MemoryRun

POLICIES = {
    "auto-profile": ['generate.memory={use="auto-profile"}'],
    "fraction 0.9, nothing reserved": [
        'generate.memory={use="fraction", mem_fraction=0.9}',
        "encode.reserved=0",
    ],
}
HEADROOM_BYTES = 256 << 20


def memory(
    path: Annotated[str, typer.Argument(help="Folder of the checkpoint.")],
    assignments: SetOption = None,
    limit: Annotated[str, typer.Option(help="Hard limit on a rank, as in 2GiB.")] = "900MiB",
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of load for each policy.")] = 30,
    bisect: Annotated[bool, typer.Option(help="Also find the largest size by bisection.")] = False,
    out: JsonOption = None,
    plot: PlotOption = None,
) -> None:
    """Load two servers to the maximum under a hard limit: one with profiled memory, one with a fixed share."""
    from rich.console import Console

    from tests.bench.parts.memory.measure import default_settings
    from vsched.config.sections import size_bytes

    console = Console()
    settings = [*default_settings(path), *(assignments or ())]
    limit_bytes = size_bytes(limit, path="--limit")
    report = asyncio.run(_measure(settings, limit_bytes, seconds, console, bisect=bisect))
    _show(report, console)
    if out is not None:
        write_json(out, report)
    if plot is not None:
        _plot(report["runs"], limit_bytes, plot)
        console.print(f"Plot: {plot}")


async def _measure(
    settings: list[str], limit_bytes: int, seconds: float, console: Console, *, bisect: bool
) -> dict[str, Any]:
    from rich.progress import Progress

    from tests.bench.parts.memory import measure as bench

    runs: list[MemoryRun] = []
    largest = 0
    with Progress(console=console, transient=True) as progress:
        for policy, overrides in POLICIES.items():
            task = progress.add_task(policy, total=seconds)
            runs.append(
                await bench.measure_memory(
                    settings,
                    policy=policy,
                    overrides=overrides,
                    limit_bytes=limit_bytes,
                    seconds=seconds,
                    advanced=lambda done, task=task: progress.update(task, completed=done),  # type: ignore[misc]
                )
            )
            progress.update(task, completed=seconds)
        if bisect and runs[0].kv_tokens:
            progress.add_task("the largest size that survives the profiling run", total=None)
            found = runs[0].kv_tokens
            largest = await bench.find_largest(
                settings,
                limit_bytes=limit_bytes,
                headroom_bytes=HEADROOM_BYTES,
                low=found,
                high=2 * found,
            )
    return {
        "seconds": seconds,
        "limit_bytes": limit_bytes,
        "verdicts": {run.policy: run.verdict for run in runs},
        "runs": runs,
        "largest_tokens": largest,
    }


def _show(report: dict[str, Any], console: Console) -> None:
    from rich.table import Table

    from vsched.memory import size_text

    table = Table(
        title=f"{report['seconds']:g} s under a limit of {size_text(report['limit_bytes'])}"
    )
    table.add_column("memory policy")
    for name in ("KV tokens", "start s", "served", "refused", "lost", "ranks lost", "promise"):
        table.add_column(name, justify="right")
    for run in report["runs"]:
        table.add_row(
            run.policy,
            f"{run.kv_tokens:,}",
            f"{run.start_s:.1f}",
            str(run.served),
            str(sum(run.refusals.values())),
            str(sum(run.lost.values())),
            str(run.losses),
            run.verdict,
        )
    console.print(table)
    for run in report["runs"]:
        if run.failure:
            console.print(f"{run.policy} did not start, or not go on: {run.failure}")
        if run.lost:
            console.print(f"{run.policy} lost: {run.lost}")
    if "inconclusive" in report["verdicts"].values():
        console.print("inconclusive: nothing finished. Remedy: raise --seconds")
    if set(report["verdicts"].values()) == {"kept"}:
        console.print("no contrast: under this load, no policy lost a request")
    if report["largest_tokens"]:
        found, largest = report["runs"][0].kv_tokens, report["largest_tokens"]
        console.print(
            f"{found:,} tokens found; the largest size that survives the same profiling run is {largest:,}: "
            f"{100 * found / largest:.1f} %"
        )


def _plot(runs: list[MemoryRun], limit_bytes: int, path: Path) -> None:
    figure = new_figure(10, 4)
    axes = figure.subplots(1, len(runs), sharey=True)
    for axis, run in zip(axes, runs, strict=True):
        seconds = [sample.seconds for sample in run.samples]
        axis.plot(seconds, [sample.bytes / (1 << 20) for sample in run.samples])
        axis.axhline(limit_bytes / (1 << 20), color="red", linestyle="--", label="limit")
        lost = sum(run.lost.values())
        axis.set_title(f"{run.policy}: {run.served} served, {lost} lost")
        axis.set_xlabel("seconds under load")
        axis.legend(loc="lower right")
    axes[0].set_ylabel("private memory of the rank, MiB")
    figure.savefig(path, dpi=130)
