"""Metrics of a complete engine with simulated ranks, as Prometheus reads them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.api.fakes import FakeEngine, ask
from vsched.api.metrics import ApiMetrics, Report, added
from vsched.api.response_schema import PromptDetails, Usage
from vsched.sim.cluster import SimEngine, small_config
from vsched.sim.loop import VirtualLoop
from vsched.sim.ranks.symbolic_workers import SymbolicGenerator

BODY = {"prompt": "1 2 3", "max_tokens": 4, "ignore_eos": True}
GROUP = {"group": "generate"}
MODEL = small_config().model.served_name


def families(text: bytes) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text.decode())}


def value(family: Any, **labels: str) -> float:
    own = {"model_name": MODEL, **labels}
    (found,) = [one.value for one in family.samples if one.labels == own]
    return float(found)


def _calls(found: dict[str, Any]) -> list[Any]:
    return list(found["vsched_policy_call_seconds"].samples)


async def observed() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metrics before and after two served requests, a refused one, and a restart."""
    async with SimEngine() as engine:
        scrapes = []
        for _ in range(2):
            scrapes.append(families((await engine.client.request("GET", "/metrics")).body))
            for body in (BODY, BODY, {**BODY, "max_tokens": 256}):
                await engine.client.request("POST", "/v1/completions", json=body)
            killed = {"group": "generate", "action": "restart"}
            await engine.client.request("POST", "/admin/replicas", json=killed)
        return scrapes[0], scrapes[1]


def test_metrics_count_with_labels() -> None:
    """Counters are counters, and no name has a group, a reason or a rank in it."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        before, after = runner.run(observed())
    for name, labels, grown in (
        ("vsched_requests_finished", {"finished_reason": "length"}, 2),
        ("vsched_requests_admitted", GROUP, 2),
        ("vsched_tokens_prefilled", GROUP, 6),
        ("vsched_group_restarts", GROUP, 1),
        ("vsched_num_preemptions", GROUP, 0),
    ):
        assert after[name].type == "counter", name
        assert value(after[name], **labels) - value(before[name], **labels) == grown, name
        assert {one.name for one in after[name].samples} == {f"{name}_total"}
    assert value(after["vsched_requests_refused"], reason="context_exceeded") == 1
    calls = {(one.name, one.labels["seat"]): one.value for one in _calls(after)}
    assert calls["vsched_policy_call_seconds_count", "generate.admission"] >= 2
    assert value(after["vsched_policy_replaced"], seat="generate.admission") == 0
    assert value(after["vsched_group_busy_seconds"], **GROUP) > 0
    for name, wanted in (("vsched_num_requests_running", 0), ("vsched_kv_cache_usage_perc", 0)):
        assert after[name].type == "gauge"
        assert value(after[name], **GROUP) == wanted
    assert value(after["vsched_group_up"], group="encode") == 1
    memory = after["vsched_rank_memory_bytes"].samples
    assert all(set(one.labels) == {"model_name", "group", "rank", "kind"} for one in memory)
    assert not any("generate" in name or "length" in name for name in after)


async def observed_threads(numbers: list[int]) -> list[Any]:
    """Values of metrics, statistics and groups for a rank at each number of threads, with a request in between."""
    small = small_config()
    config = small_config(generate=msgspec.structs.replace(small.generate, threads=2))
    rank = {**GROUP, "rank": "0"}
    seen: list[Any] = []
    async with SimEngine(config) as engine:
        while True:
            found = families((await engine.client.request("GET", "/metrics")).body)
            values = [value(found[f"vsched_rank_threads{end}"], **rank) for end in ("", "_max")]
            statistics = (await engine.client.request("GET", "/admin/statistics")).json()
            groups = (await engine.client.request("GET", "/admin/replicas")).json()["groups"]
            (row,) = [one for one in groups if one["name"] == "generate"]
            seen.append((*values, statistics["threads"]["generate"], row["ranks"][0]["threads"]))
            if len(numbers) == 1:
                return seen
            numbers.pop(0)
            await engine.client.request("POST", "/v1/completions", json=BODY)


def test_metrics_and_statistics_have_the_threads_of_each_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As soon as it serves, and after the step in which the number changed."""
    numbers = [2, 1, 2]
    monkeypatch.setattr(SymbolicGenerator, "threads_here", lambda _: numbers[0])
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        seen = runner.run(observed_threads(numbers))
    assert seen == [(now, 2, {"0": {"active": now, "total": 2}}, now) for now in (2, 1, 2)]


async def test_metrics_report_what_groups_were_lost_of() -> None:
    engine = FakeEngine()
    losses = {"ProcessExited": 2, "RankSilent": 1}
    engine.rows = [{"name": "encode-1", "state": "down", "losses": losses, "restarts": 3}]
    lines = (await ask("GET", "/metrics", engine=engine)).body.decode().splitlines()
    labels = 'group="encode-1",model_name="demo"'
    for line in (
        f"vsched_group_up{{{labels}}} 0.0",
        f"vsched_group_restarts_total{{{labels}}} 3.0",
        f'vsched_group_losses_total{{{labels},reason="ProcessExited"}} 2.0',
        f'vsched_group_losses_total{{{labels},reason="RankSilent"}} 1.0',
        "# TYPE vsched_group_losses_total counter",
    ):
        assert line in lines


def counted(*outcomes: str, tenant: str = "") -> ApiMetrics:
    """Metrics with requests of these outcomes; an empty outcome is a request in flight."""
    metrics = ApiMetrics()
    for outcome in outcomes:
        record = metrics.begin("chat", tenant=tenant)
        record.output()
        record.tokens(Usage(5, 3, 8, PromptDetails(2)))
        if outcome:
            record.end(outcome)
    return metrics


def lines(metrics: ApiMetrics) -> set[str]:
    return set(metrics.render().decode().splitlines())


def test_reports_add_to_the_counters_and_histograms_of_a_process() -> None:
    """Also samples that only one of the processes has."""
    own = counted("stop", "length", tenant="a")
    other = counted("stop", "", tenant="b")
    frame = msgspec.msgpack.encode(other.report())
    own.reports = lambda: [msgspec.msgpack.decode(frame, type=Report)]
    reported = lines(own)
    assert 'vsched_requests_total{endpoint="chat",outcome="stop"} 2.0' in reported
    assert 'vsched_requests_total{endpoint="chat",outcome="length"} 1.0' in reported
    assert 'vsched_tenant_requests_total{outcome="stop",tenant="b"} 1.0' in reported
    assert "vsched_prompt_tokens_total 20.0" in reported
    assert 'vsched_time_to_first_token_seconds_bucket{le="+Inf"} 4.0' in reported
    assert "vsched_e2e_request_latency_seconds_count 3.0" in reported
    assert own.under_way == 1


def test_reports_of_a_process_that_has_died_are_kept() -> None:
    """Counters never go back: its counts are added to those of the remaining processes."""
    gone = Report(0, added([counted("stop", "").report(), counted("stop").report()]))
    own = counted("stop")
    own.reports = lambda: [gone, Report()]
    assert 'vsched_requests_total{endpoint="chat",outcome="stop"} 3.0' in lines(own)
    assert own.under_way == 0
