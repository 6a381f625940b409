"""vLLM's scheduler with policies: nothing is lost, whatever they do, and without them it is vLLM's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.driving import drive, make_scheduler, random_load, write_model
from tests.vllm.policies import HERE

A, S, P = "vsched_policies.admission:", "vsched_policies.step:", "vsched_policies.preemption:"
FIFO = {"generate": {"admission": {"use": A + "Fifo"}, "step": {"use": S + "InOrder"}}}
SHORTEST = {
    "generate": {
        "admission": {"use": A + "ShortestFirst", "table": [[100000, 20]]},
        "preemption": {"use": P + "Cheapest"},
    }
}
FAIR = {"policy": {"use": "vsched_policies.requests:TenantFair", "quantum_tokens": 64}}
TIMED = {
    "generate": {
        "step_target_ms": 1,
        "step_target_ratio": 1.5,
        "admission": {"use": A + "Priority"},
        "step": {"use": S + "SloFeedback"},
    }
}
BAD = {"policy": {"use": f"{HERE}:Bad"}}
LAST = {"policy": {"use": f"{HERE}:LastFirst"}}
GATHER = {"generate": {"admission": {"use": f"{HERE}:Gather"}}}
SLOW = {
    "policies": {"call_budget_ms": 1, "slow_calls_max": 2},
    "generate": {"admission": {"use": f"{HERE}:Slow"}},
}
EVERY: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "fifo": FIFO,
    "shortest": SHORTEST,
    "fair": FAIR,
    "timed": TIMED,
    "bad": BAD,
    "last": LAST,
    "gather": GATHER,
    "slow": SLOW,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


def check_settled(scheduler: Any) -> None:
    """Check that no request and no block is left."""
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == scheduler.cache_config.num_gpu_blocks - 1
    assert not (*scheduler.running, *scheduler.waiting, *scheduler.requests)
    assert not scheduler._prefilling
    assert not scheduler._flying
    assert scheduler.host.faults == {}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", EVERY)
def test_each_request_gets_its_tokens_and_all_blocks_come_back(
    model: str, name: str, asynchronous: bool
) -> None:
    scheduler = make_scheduler(model, EVERY[name], asynchronous=asynchronous)
    load = random_load(3, 60)
    run = drive(scheduler, load, depth=1 + asynchronous, seed=3)
    wanted = {one.request_id: one.max_tokens for one in random_load(3, 60)}
    assert {one: len(tokens) for one, tokens in run.tokens.items()} == wanted
    check_settled(scheduler)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", ["none", "fifo", "bad"])
def test_without_policies_or_with_failing_ones_each_step_is_that_of_vllm(
    model: str, name: str, asynchronous: bool
) -> None:
    steps = []
    for tables in (None, EVERY[name]):
        scheduler = make_scheduler(model, tables, asynchronous=asynchronous)
        run = drive(scheduler, random_load(5, 50), depth=1 + asynchronous, seed=5)
        steps.append(run.scheduled)
    assert steps[0] == steps[1]
    if name == "bad":
        assert sum(scheduler.host.seats.faults.counts.values()) > 20


@pytest.mark.parametrize("name", ["fair", "last", "bad", "timed"])
def test_clients_that_leave_lose_nothing_of_others(model: str, name: str) -> None:
    scheduler = make_scheduler(model, EVERY[name], asynchronous=True)
    run = drive(scheduler, random_load(7, 60), depth=2, seed=7, leave=0.05)
    assert len(run.aborted) > 5
    wanted = {one.request_id: one.max_tokens for one in random_load(7, 60)}
    kept = {one: len(tokens) for one, tokens in run.tokens.items() if one not in run.aborted}
    assert kept == {one: wanted[one] for one in kept}
    check_settled(scheduler)


def test_slow_policy_is_replaced_and_then_vllm_order_goes_on(model: str) -> None:
    scheduler = make_scheduler(model, SLOW)
    drive(scheduler, random_load(1, 40))
    assert scheduler.host.seats.replaced().keys() == {"generate.admission"}
    assert scheduler.host.figures()["policy_calls"]["generate.admission"]["calls"] < 10
