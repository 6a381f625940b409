"""`vsched calibrate-vllm`: a cost model for simulations from a run inside vLLM."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated

import typer

from vsched.cli import app


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

    found = read_run(run)
    model = fit_run(found, load_cost_model(shape), name=run.name.partition(".")[0])
    save_cost_model(model, output)
    error = model.generate_error
    assert error is not None
    typer.echo(
        f"{output}: {error.samples} steps, error {error.median:.0%} at the median, {error.p95:.0%} at p95"
    )
    for tenant, times in found.ttft_ms().items():
        middle = statistics.median(times)
        typer.echo(f"{tenant or 'all'}: {len(times)} requests, TTFT p50 {middle:,.0f} ms")
    sets = " ".join(f"--set {one}" for one in simulated_settings(found))
    trace = str(run).removesuffix(".run")
    typer.echo(f"Next: vsched simulate --cost {output} --trace {trace} {sets}")
