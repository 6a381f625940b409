"""`python -m tests.bench.apart`: each half of two replicas is simulated without the work of the other."""

from __future__ import annotations

from tests.bench.apart.__main__ import MIXED, compare, decode_only, prefill_only
from vsched.sim import generate_workload, load_cost_model


def test_halves_have_the_same_requests_without_the_work_of_the_other() -> None:
    workload = generate_workload("poisson", seed=0, requests=20, rate=8.0)
    halves = list(prefill_only(workload))
    assert [one.prompt for one in halves] == [one.prompt for one in workload]
    assert {one.output_tokens for one in halves} == {1}
    cost = load_cost_model("h100-7b")
    decode = {"decodes": 10, "context": 5000}
    without = decode_only(cost)
    assert without.generate_ns(**decode) == cost.generate_ns(**decode)
    assert without.generate_ns(**decode, prefill=500, pairs=1e5) == cost.generate_ns(**decode)
    assert without.encode_ns([1000]) < 10


def test_a_row_for_each_way_to_use_two_replicas() -> None:
    rows = [row.split("|") for row in compare(8.0, requests=12, model="h100-7b")]
    assert [row[2].strip() for row in rows] == [*MIXED, "one that prefills", "one that decodes"]
    mixed, prefills, decodes = rows[0], rows[-2], rows[-1]
    assert not prefills[4].strip()
    ttft = [float(row[3].split("/")[0].replace(",", "")) for row in (mixed, decodes)]
    assert ttft[1] < ttft[0]
