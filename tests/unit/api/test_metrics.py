"""Metrics of a complete engine with simulated ranks, as Prometheus reads them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.api.fakes import FakeEngine, ask
from vsched.api.metrics import ApiMetrics, Report, added
from vsched.api.response_schema import PromptDetails, Usage
from vsched.sim.cluster import SimEngine, small_config
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


@pytest.mark.sim
async def test_metrics_count_with_labels() -> None:
    """Counters are counters, and no name has a group, a reason or a rank in it."""
    small = {"memory": {"use": "pinned", "tokens": 128}}
    async with SimEngine(small_config(generate=small)) as engine:
        scrapes = []
        for _ in range(2):
            scrapes.append(families((await engine.client.request("GET", "/metrics")).body))
            for body in (BODY, BODY, {**BODY, "prompt": [1] * 128}):
                await engine.client.request("POST", "/v1/completions", json=body)
            killed = {"group": "generate", "action": "restart"}
            await engine.client.request("POST", "/admin/replicas", json=killed)
    before, after = scrapes
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
    assert value(after["vsched_requests_refused"], reason="kv_exceeded") == 1
    samples = after["vsched_policy_call_seconds"].samples
    calls = {(one.name, one.labels["seat"]): one.value for one in samples}
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


@pytest.mark.sim
async def test_metrics_and_statistics_count_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as it serves, and after the step in which the number changed."""
    numbers = [2]
    monkeypatch.setattr(SymbolicGenerator, "threads_here", lambda _: numbers[0])
    generate = msgspec.structs.replace(small_config().generate, threads=2)
    async with SimEngine(small_config(generate=generate)) as engine:
        ask = engine.client.request
        for index, now in enumerate((2, 1, 2)):
            numbers[0] = now
            if index:
                await ask("POST", "/v1/completions", json=BODY)
            found = families((await ask("GET", "/metrics")).body)
            for name, wanted in (("vsched_rank_threads", now), ("vsched_rank_threads_max", 2)):
                assert value(found[name], **GROUP, rank="0") == wanted
            statistics = (await ask("GET", "/admin/statistics")).json()
            assert statistics["threads"]["generate"] == {"0": {"active": now, "total": 2}}
            groups = (await ask("GET", "/admin/replicas")).json()["groups"]
            (row,) = [one for one in groups if one["name"] == "generate"]
            assert row["ranks"][0]["threads"] == now


async def test_metrics_report_the_reasons_of_lost_groups() -> None:
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
        record = metrics.begin_request("chat", tenant=tenant)
        record.output()
        record.tokens(Usage(5, 3, 8, PromptDetails(2)))
        if outcome:
            record.end_request(outcome)
    return metrics


def test_reports_of_other_processes_add_to_the_counters_also_of_one_that_has_died() -> None:
    """Also samples that only one of the processes has; counters never go back."""
    own = counted("stop", "length", tenant="a")
    frame = msgspec.msgpack.encode(counted("stop", "", tenant="b").report())
    gone = Report(0, added([counted("stop", "").report(), counted("stop").report()]))
    own.reports = lambda: [msgspec.msgpack.decode(frame, type=Report), gone]
    reported = own.render().decode().splitlines()
    for line in (
        'vsched_requests_total{endpoint="chat",outcome="stop"} 4.0',
        'vsched_requests_total{endpoint="chat",outcome="length"} 1.0',
        'vsched_tenant_requests_total{outcome="stop",tenant="b"} 1.0',
        "vsched_prompt_tokens_total 35.0",
        'vsched_time_to_first_token_seconds_bucket{le="+Inf"} 7.0',
        "vsched_e2e_request_latency_seconds_count 5.0",
    ):
        assert line in reported
    assert own.under_way == 1, "not those of the dead process"
