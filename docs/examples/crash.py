"""Crash the language model's replica in a simulation: every request is finished after it restarts."""

from vsched.config import Config
from vsched.sim import GroupOutage, generate_workload, load_cost_model, simulate

SECOND_NS = 1_000_000_000

workload = generate_workload("poisson", seed=0, requests=60, rate=2.0)
crash = GroupOutage(group="generate", at_ns=5 * SECOND_NS, duration_ns=3 * SECOND_NS)
for label, outages in (("no fault", ()), ("crash", (crash,))):
    figures = simulate(Config(), workload, cost=load_cost_model("h100-7b"), outages=outages).figures
    print(
        f"{label}: {figures.finished} of {figures.requests} finished, "
        f"slowest first token {figures.ttft_ms.p99:.0f} ms"
    )
