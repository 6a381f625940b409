"""vLLM's scheduler and embedding cache with policies: nothing is lost, whatever they do; without them, its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from tests.vllm.driving import drive, make_request, make_scheduler, worker, write_model
from vsched.integrations.vllm.embeddings import PolicyEncoderCache, logger
from vsched.integrations.vllm.settings import capabilities
from vsched.policy import (
    Admission,
    AdmissionView,
    CachePolicy,
    EvictionOrder,
    Key,
    Policy,
    PreemptionView,
    RequestPolicy,
    StepShares,
    StepView,
)
from vsched.policy.checks import PASSED_OVER
from vsched.testing.contracts.host import HostLoad, HostRun, check_host, random_load

HERE = "tests.vllm.test_scheduler"


class Slow(RequestPolicy, frozen=True, kw_only=True):
    """Sleeps in each call."""

    seconds: float

    def admit(self, view: AdmissionView) -> Admission:
        time.sleep(self.seconds)
        return Admission([len(view.waiting) - 1])


class LastFirst(RequestPolicy, frozen=True, kw_only=True):
    """Serves the latest arrival first, everywhere, and takes blocks from the longest request."""

    def admit(self, view: AdmissionView) -> Admission:
        return Admission(range(len(view.waiting))[::-1])

    def share(self, view: StepView) -> StepShares:
        """Prefill the latest one, 48 tokens at a time."""
        last = [len(view.prefilling) - 1] if view.prefilling else []
        return StepShares(last, [48] * len(last))

    def victim(self, view: PreemptionView) -> int:
        """Preempt the request with the most tokens that is eligible."""
        return max(view.eligible, key=lambda index: view.running[index].tokens)


A, S, P = "vsched_policies.admission:", "vsched_policies.step:", "vsched_policies.preemption:"
FIFO = {"generate": {"admission": {"use": A + "Fifo"}, "step": {"use": S + "InOrder"}}}
SHORTEST = {
    "generate": {
        "admission": {"use": A + "ShortestFirst", "output_weight": 20},
        "preemption": {"use": P + "Cheapest"},
    }
}
FAIR = {"policy": {"use": "vsched_policies.requests:TenantFair", "quantum_tokens": 64}}
TIMED = {
    "generate": {
        "step_target_ms": 1,
        "prefill_target_ms": 1,
        "step_target_ratio": 1.5,
        "admission": {"use": A + "Priority"},
        "step": {"use": S + "SloFeedback"},
    }
}
BAD = {"policy": {"use": "vsched.testing.contracts.host:Fails"}}
LAST = {"policy": {"use": f"{HERE}:LastFirst"}}
SLOW = {
    "policies": {"call_budget_ms": 1, "slow_calls_max": 2},
    "generate": {"admission": {"use": f"{HERE}:Slow", "seconds": 0.2}},
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
@pytest.mark.parametrize("tables", [SHORTEST, FAIR, TIMED, LAST, SLOW])
def test_each_request_gets_its_tokens_and_all_blocks_come_back(
    model: str, tables: Mapping[str, Any], asynchronous: bool
) -> None:
    scheduler = make_scheduler(model, tables, asynchronous=asynchronous)
    load = random_load(3, 60)
    run = drive(scheduler, load, depth=1 + asynchronous)
    assert run.tokens == {one.request_id: one.outputs for one in load}
    check_settled(scheduler)
    if tables is SLOW:
        assert scheduler.host.seats.replaced().keys() == {"generate.admission"}
        assert scheduler.host.figures()["policy_calls"]["generate.admission"]["calls"] < 10


def test_fifo_policies_plan_the_steps_of_vllm(model: str) -> None:
    steps = []
    for tables in (None, FIFO):
        scheduler = make_scheduler(model, tables, asynchronous=True)
        steps.append(drive(scheduler, random_load(5, 50), depth=2).scheduled)
    assert steps[0] == steps[1]


def loaded(model: str, tables: Mapping[str, Any], running: int, *, blocks: int = 4000) -> Any:
    """Return a scheduler with `running` decoding requests."""
    scheduler = make_scheduler(model, tables, slots=96, tokens=8192, blocks=blocks)
    for index in range(running):
        scheduler.add_request(make_request(f"r{index}", range(100 * index, 100 * index + 20), 500))
    for _ in range(5):
        step(scheduler)
    return scheduler


def step(scheduler: Any) -> None:
    output = scheduler.schedule()
    done = dict.fromkeys(output.num_scheduled_tokens, True)
    scheduler.update_from_output(output, worker(output, done))


def lines_of_bridge(scheduler: Any) -> int:
    """Return the number of lines of vsched that a step runs; each turn of a loop counts."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if "/vsched/" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    step(scheduler)  # the search of the prefix cache, for example, is not in each step
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        step(scheduler)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("tables", [{}, FIFO, SHORTEST])
def test_bridge_does_nothing_per_decoding_request(model: str, tables: Mapping[str, Any]) -> None:
    few, many = (lines_of_bridge(loaded(model, tables, count)) for count in (4, 64))
    assert few == many
    assert few < 120


def test_policy_is_called_again_only_after_a_change(model: str) -> None:
    scheduler = loaded(model, SHORTEST, 4, blocks=140)
    for index in range(20):  # each needs more blocks than are free
        scheduler.add_request(make_request(f"w{index}", range(1000 + index, 4000), 10))

    def calls() -> int:
        return int(scheduler.host.figures()["policy_calls"]["generate.admission"]["calls"])

    step(scheduler)
    known = calls()
    for _ in range(60):
        step(scheduler)
    assert calls() == known
    scheduler.add_request(make_request("new", range(3000, 3020), 3))
    step(scheduler)
    assert calls() == known + 1
    for _ in range(3):
        step(scheduler)
    assert "new" not in scheduler.requests
    assert calls() > known + 1
    assert len(scheduler.waiting) == 20


def test_figures_of_an_idle_scheduler_are_those_after_the_last_request(model: str) -> None:
    scheduler = make_scheduler(model, {**FIFO, "vllm": {"statistics": True}})
    drive(scheduler, random_load(1, 10))
    file = scheduler._statistics
    figures = msgspec.json.decode(file.read_bytes())
    file.unlink()
    assert (figures["running"], figures["waiting"]) == (0, 0)
    calls = scheduler.host.figures()["policy_calls"]["generate.admission"]["calls"]
    assert figures["policy_calls"]["generate.admission"]["calls"] == calls > 0


def test_request_that_is_passed_over_for_too_long_goes_first(model: str) -> None:
    scheduler = make_scheduler(model, {**LAST, "policies": {"passed_over_max_s": 1e-6}})
    drive(scheduler, random_load(2, 80))
    overruled = scheduler.host.seats.overruled()
    assert overruled["generate.admission"][PASSED_OVER] > 5
    check_settled(scheduler)


def run_host(
    model: str, *, asynchronous: bool
) -> Callable[[Mapping[str, Policy] | None, Sequence[HostLoad]], HostRun]:
    """Return the host for the contract suite: vLLM's scheduler, with a worker of one token a step."""

    def run(policies: Mapping[str, Policy] | None, load: Sequence[HostLoad]) -> HostRun:
        tables: dict[str, Any] | None = None
        if policies is not None:
            tables = {"generate": {}}
            for path, one in policies.items():
                name = f"{type(one).__module__}:{type(one).__qualname__}"
                table = {"use": name, **msgspec.to_builtins(one)}
                tables["generate"][path.removeprefix("generate.")] = table
        scheduler = make_scheduler(model, tables, asynchronous=asynchronous)
        done = drive(scheduler, load, depth=1 + asynchronous)
        pool, total = scheduler.kv_cache_manager.block_pool, scheduler.cache_config.num_gpu_blocks
        figures = scheduler.host.figures() if policies is not None else {}
        assert not figures.get("host_faults")
        return HostRun(
            outputs=done.tokens,
            steps=done.scheduled,
            blocks_held=total - 1 - pool.get_num_free_blocks(),
            requests_left=len(scheduler.requests),
            policy_faults=sum(figures.get("policy_faults", {}).values()),
            calls={path: one["calls"] for path, one in figures.get("policy_calls", {}).items()},
        )

    return run


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_vllm_meets_the_contract_of_hosts(model: str, asynchronous: bool) -> None:
    check_host(run_host(model, asynchronous=asynchronous), capabilities("0.32.0"))


SIZES = {"a": 4, "b": 2, "c": 1, "d": 3}


class Broken(CachePolicy, frozen=True, kw_only=True):
    """Returns no order."""

    def build_order(self) -> EvictionOrder[Key]:
        raise RuntimeError("a bug")


def request(name: str) -> Any:
    """Return a request with one image of that name."""
    return SimpleNamespace(
        request_id=f"of {name}",
        mm_features=[SimpleNamespace(identifier=name)],
        get_num_encoder_embeds=lambda _: SIZES[name],
    )


def evicted(tables: Mapping[str, Any]) -> list[str]:
    """Use `b` twice and then three other images in a cache for nine embeddings; return those evicted."""
    config = SimpleNamespace(additional_config={"vsched": tables})
    cache = PolicyEncoderCache.create_manager(cache_size=9, vllm_config=config)
    for name in ("b", "b", "a", "c", "d"):
        one = request(name)
        if not cache.check_and_update_cache(one, 0):
            assert cache.can_allocate(one, 0, 100, 0)
            cache.allocate(one, 0)
        cache.free(one)
    gone: list[str] = cache.freed
    return gone


@pytest.mark.parametrize(
    ("tables", "gone"),
    [
        ({}, ["b"]),
        ({"encode": {"eviction": {"use": "vsched_policies.eviction:Lru"}}}, ["b"]),
        ({"encode": {"eviction": {"use": f"{HERE}:Broken"}}}, ["b"]),
        ({"encode": {"eviction": {"use": "vsched_policies.eviction:S3Fifo"}}}, ["a"]),
    ],
)
def test_the_policy_names_the_embeddings_that_are_evicted(
    tables: Mapping[str, Any], gone: list[str]
) -> None:
    assert evicted(tables) == gone


def test_failures_of_the_policy_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: lines.append(text % values))
    evicted({"encode": {"eviction": {"use": f"{HERE}:Broken"}}})
    (line,) = lines
    assert line.startswith("policy Broken failed at test_scheduler.py:")
