"""`vsched profile`: measure memory or step times on this machine; `calibrate-vllm`: step times of a run inside vLLM."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vsched.bench.fidelity.command import (
    CALIBRATION_S,
    run_calibration_here,
    show_costs,
)
from vsched.cli import app
from vsched.errors import ConfigError, VschedError
from vsched.terminal.options import (
    CheckpointArgument,
    ConfigOption,
    JsonOption,
    SetOption,
    check_writable,
    load_measured,
    write_json,
)

if TYPE_CHECKING:
    from rich.console import Console

    from vsched.config import Config
    from vsched.memory import Ledger

SERVERS_S = 1.5
"""Time for the image server, which starts last, to load before its memory is read."""
_PROCESSES = {
    "engine_resident": "engine process",
    "image_server_resident": "image server",
    "grammar_server_resident": "grammar server",
}
"""Names of the processes besides the ranks, by their keys in the statistics."""


@app.command()
def profile(
    path: CheckpointArgument,
    config: ConfigOption = None,
    assignments: SetOption = None,
    out: JsonOption = None,
    *,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure step times; --json is a cost model.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, help=f"Measuring time of --calibrate; {CALIBRATION_S:g} by default."),
    ] = None,
) -> None:
    """Size the memory as `vsched serve` would and show the use of every byte; or measure step times instead."""
    from rich.console import Console

    if seconds is not None and not calibrate:
        raise ConfigError("--seconds: needs --calibrate. Remedy: add --calibrate, or leave it out")
    check_writable({"--json": out})
    console = Console()
    settings = load_measured(config, assignments, path)
    if calibrate:
        from vsched.sim.cost.model import save_cost_model

        model = run_calibration_here(settings, console, seconds or CALIBRATION_S)
        show_costs(model, console)
        if out is not None:
            save_cost_model(model, out)
            console.print(f"Cost model: {out}; use it with vsched simulate --cost {out}")
        return
    started_s = time.monotonic()
    ledger, statistics, error = asyncio.run(_size(settings, console))
    threads, memory = statistics.get("threads", {}), statistics.get("memory", {})
    blocks = statistics["generate"]["blocks_total"] if statistics else 0
    tokens = blocks * settings.generate.block_size
    if ledger is not None:
        console.print(ledger.render_phases(), markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        found = {"kv_tokens": tokens, "error": str(error or ""), "threads": threads}
        figures = ledger.as_dict() if ledger is not None else {}
        write_json(out, {**found, "memory": memory, **figures})
        console.print(f"JSON: {out}")
    if error is not None:
        raise error
    assert ledger is not None, "an engine that started has a ledger"
    spent_s = time.monotonic() - started_s
    console.print(f"\n{tokens} tokens of KV cache, found in {spent_s:.1f} s\n")
    for group, ranks in threads.items():
        for rank, count in ranks.items():
            used = f"{count['active']} of {count['total']} threads"
            console.print(f"{group} rank {rank} computes with {used}", highlight=False)
    for name, process in _PROCESSES.items():
        if size := memory.get(name):
            console.print(f"{process} uses {size / 2**20:,.1f} MiB", highlight=False)
    console.print()
    console.print(ledger.render(), markup=False, highlight=False)


async def _size(
    settings: Config, console: Console
) -> tuple[Ledger | None, dict[str, Any], VschedError | None]:
    """Start an engine, which sizes the memory, and stop it; return ledger and statistics, or the error."""
    from vsched.engine import Engine
    from vsched.terminal.progress import loading_progress

    with loading_progress(console) as report:
        engine = Engine(settings, on_progress=report)
        try:
            async with engine:
                await asyncio.sleep(SERVERS_S)
                return engine.ledger, engine.statistics(), None
        except VschedError as error:
            return engine.ledger, {}, error


@app.command("calibrate-vllm")
def calibrate_vllm(
    run: Annotated[
        Path, typer.Argument(help="The file .run next to the trace that `vllm.trace` names.")
    ],
    output: Annotated[Path, typer.Option(help="Cost model to write, as JSON.")],
    shape: Annotated[
        str, typer.Option(help="Cost model with the shape of the model: a name or a file.")
    ] = "h100-7b",
) -> None:
    """Fit step times to a run inside vLLM, and print the times that its requests had.

    The cost model and the trace of the run are the input of `vsched simulate`, which compares
    policies before they are served.
    """
    from vsched.sim.cost.host_runs import fit_run, read_run, simulated_settings
    from vsched.sim.cost.model import load_cost_model, save_cost_model

    check_writable({"--output": output})
    found = read_run(run)
    model = fit_run(found, load_cost_model(shape), name=run.name.partition(".")[0])
    save_cost_model(model, output)
    error = model.generate_error
    assert error is not None
    typer.echo(
        f"{output}: {error.samples} steps, error {error.median:.0%} at the median, {error.p95:.0%} at p95"
    )
    for tenant, times in found.ttft_ms().items():
        typer.echo(f"{tenant or 'all'}: {len(times)} requests, TTFT p50 {median(times):,.0f} ms")
    sets = " ".join(f"--set {one}" for one in simulated_settings(found))
    trace = str(run).removesuffix(".run")
    typer.echo(f"Next: vsched simulate --cost {output} --trace {trace} {sets}")
