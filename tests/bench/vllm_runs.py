"""Runs inside vLLM: `python -m tests.bench.vllm_runs {plot,predict} ... NAME=TRACE ...`.

`plot` draws the times to first token. `predict` makes a cost model from each run and simulates each of them with it,
with the policies of the file TRACE with the ending .toml: so a run is predicted from itself, and from the others.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from vsched.config import load_config
from vsched.sim.cost.host_runs import HostRunFile, fit_run, read_run, run_file, simulated_settings
from vsched.sim.cost.model import load_cost_model
from vsched.sim.fast.simulation import simulate
from vsched.sim.workload.traces import load_trace


def plot(target: str, runs: dict[str, HostRunFile]) -> None:
    """Draw a panel for each run, with a dot for each request."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(
        1, len(runs), figsize=(4 * len(runs), 3.2), sharey=True, squeeze=False
    )
    for panel, (name, run) in zip(panels[0], runs.items(), strict=True):
        tenants = sorted({one.tenant for one in run.requests if one.tenant})
        for tenant in tenants:
            times = [one.ttft_ns / 1e6 for one in run.requests if one.tenant == tenant]
            panel.scatter([tenant] * len(times), times, s=14, alpha=0.7)
        panel.set_title(name)
        panel.grid(axis="y", alpha=0.3)
    panels[0][0].set_ylabel("time to first token, ms")
    figure.tight_layout()
    figure.savefig(target, dpi=110)


def predict(traces: dict[str, Path], runs: dict[str, HostRunFile]) -> None:
    """Print the measured and the simulated p50 and mean of the times to first token."""
    base = load_cost_model("tiny25")
    for source, run in runs.items():
        cost = fit_run(run, base, name=source)
        for name, served in runs.items():
            config = load_config(
                traces[name].with_suffix(".toml"), sets=simulated_settings(served), environ={}
            )
            ttft = simulate(config, load_trace(traces[name]), cost=cost).figures.ttft_ms
            times = [one.ttft_ns / 1e6 for one in served.requests]
            middle, mean = statistics.median(times), statistics.fmean(times)
            print(
                f"from {source:8} {name:8} {len(times)} requests: p50 {middle:,.0f} ms, simulated "
                f"{ttft.p50:,.0f} ({ttft.p50 / middle - 1:+.0%}); mean {mean:,.0f}, simulated "
                f"{ttft.mean:,.0f} ({ttft.mean / mean - 1:+.0%})",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["plot", "predict"])
    parser.add_argument("runs", nargs="+", metavar="NAME=TRACE")
    parser.add_argument("--png", default="runs.png")
    options = parser.parse_args()
    traces = {name: Path(path) for name, _, path in (one.partition("=") for one in options.runs)}
    runs = {name: read_run(run_file(path)) for name, path in traces.items()}
    if options.command == "plot":
        plot(options.png, runs)
    else:
        predict(traces, runs)


if __name__ == "__main__":
    main()
