"""Crash the language model's replica in a simulation: every request is finished after it restarts."""

from vsched.config import Config
from vsched.sim import FaultPlan, WorkerCrash, generate_workload, load_cost_model, simulate

SECOND_NS = 1_000_000_000

workload = generate_workload("poisson", seed=0, requests=60, rate=2.0)
crash = FaultPlan(faults=(WorkerCrash(at_ns=5 * SECOND_NS, group="generate"),))
for label, faults in (("no fault", None), ("crash", crash)):
    figures = simulate(
        Config(), workload, cost=load_cost_model("h100-7b"), faults=faults, restart_s=3.0
    ).figures
    print(
        f"{label}: {figures.finished} of {figures.requests} finished, "
        f"slowest first token {figures.ttft_ms.p99:.0f} ms"
    )
