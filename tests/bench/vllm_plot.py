"""Plot the times to first token of runs inside vLLM: `python -m tests.bench.vllm_plot OUT.png NAME=TRACE.run ...`."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from vsched.sim.cost.host_runs import read_run


def main() -> None:
    """Draw a panel for each run, with a dot for each request."""
    target, *named = sys.argv[1:]
    runs = {name: read_run(Path(path)) for name, _, path in (one.partition("=") for one in named)}
    figure, panels = plt.subplots(
        1, len(runs), figsize=(4 * len(runs), 3.2), sharey=True, squeeze=False
    )
    for panel, (name, run) in zip(panels[0], runs.items(), strict=True):
        tenants = sorted({one.tenant for one in run.requests if one.prompt_tokens > 1})
        for tenant in tenants:
            times = [one.ttft_ns / 1e6 for one in run.requests if one.tenant == tenant]
            panel.scatter([tenant] * len(times), times, s=14, alpha=0.7)
        panel.set_title(name)
        panel.grid(axis="y", alpha=0.3)
    panels[0][0].set_ylabel("time to first token, ms")
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
