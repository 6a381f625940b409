"""Upper bound for the gain of prefill/decode disaggregation: the production scheduler on a simulated 7B model.

Two replicas with both stages are compared with one prefill and one decode replica. The scheduler
has no such roles, so each of the latter is simulated by itself: the first serves the same requests
with one output token; on the second prefill takes no time, and KV transfers are free. No real
system can gain more.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import msgspec

from vsched.config import load_config
from vsched.sim import SimulationOutcome, generate_workload, load_cost_model, simulate
from vsched.sim.cost.model import CostModel
from vsched.sim.workload.requests import Arrival, Workload

SIZES = (
    "encode.device=cuda:0",
    "arena.pixel_bytes=8000000000",
    "generate.max_waiting_bytes=8000000000",
    "generate.slots=128",
)
MIXED = {
    "both, as by default": (),
    "both, steps of 20 ms": ("generate.step_target_ms=20", "generate.step_target_ratio=2"),
    "both, steps of 12 ms": ("generate.step_target_ms=12", "generate.step_target_ratio=1.5"),
}
HEAD = (
    "| requests/s | replicas | TTFT p50 / p99, ms | ITL p50 / p99, ms | TPOT p50 / p99, ms | busy |\n"
    "|---:|---|---:|---:|---:|---:|"
)


def prefill_only(workload: Workload) -> Workload:
    """Return the same requests, each ending with its first token."""

    def arrivals() -> Iterator[Arrival]:
        for arrival in workload:
            yield msgspec.structs.replace(arrival, output_tokens=1)

    return Workload(workload.name, arrivals, workload.requests)


def decode_only(cost: CostModel) -> CostModel:
    """Return the costs of a replica that gets computed prompts for free, likewise images and preparation."""
    generate = msgspec.structs.replace(cost.generate, prefill_ns=0.0, pair_ns=0.0)
    encode = msgspec.structs.replace(
        cost.encode, step_ns=1.0, item_ns=0.0, token_ns=0.0, token_pair_ns=0.0
    )
    return msgspec.structs.replace(cost, generate=generate, encode=encode)


def line(rate: float, name: str, outcome: SimulationOutcome, *, decodes: bool = True) -> str:
    """Return a row of the table."""
    figures = outcome.figures
    spreads = (figures.ttft_ms, figures.itl_ms, figures.tpot_ms)
    texts = [f"{spread.p50:,.0f} / {spread.p99:,.0f}" for spread in spreads[:1]]
    texts += [f"{one.p50:.1f} / {one.p99:.1f}" if decodes else "" for one in spreads[1:]]
    return f"| {rate:g} | {name} | {' | '.join(texts)} | {figures.generate_busy:.0%} |"


def compare(rate: float, *, requests: int, model: str) -> Iterator[str]:
    """Yield a row for each use of two replicas."""
    cost = load_cost_model(model)
    workload = generate_workload("poisson", seed=0, requests=requests, rate=rate)

    def run(
        work: Workload, costs: CostModel, replicas: int, more: Sequence[str]
    ) -> SimulationOutcome:
        sets = [*SIZES, f"generate.replicas={replicas}", *more]
        return simulate(load_config(None, sets=sets, environ={}), work, cost=costs)

    for name, more in MIXED.items():
        yield line(rate, name, run(workload, cost, 2, more))
    yield line(rate, "one that prefills", run(prefill_only(workload), cost, 1, ()), decodes=False)
    yield line(rate, "one that decodes", run(workload, decode_only(cost), 1, ()))


def main() -> None:
    """Print a table for each request rate."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.apart")
    parser.add_argument("--rates", type=float, nargs="+", default=[8.0, 16.0, 24.0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--cost", default="h100-7b")
    options = parser.parse_args()
    print(HEAD, flush=True)
    for rate in options.rates:
        for row in compare(rate, requests=options.requests, model=options.cost):
            print(row, flush=True)


if __name__ == "__main__":
    main()
