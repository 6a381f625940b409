"""Metrics of several processes are reported as if of one."""

from __future__ import annotations

import msgspec

from vsched.api.metrics import ApiMetrics, Report, added


def counted(*outcomes: str, tenant: str = "") -> ApiMetrics:
    """Metrics with requests of these outcomes; an empty outcome is a request in flight."""
    metrics = ApiMetrics()
    for outcome in outcomes:
        record = metrics.begin("chat", tenant=tenant)
        record.output()
        record.tokens(prompt=5, cached=2, output=3)
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


def test_reports_change_nothing_if_there_is_one_process() -> None:
    metrics = counted("stop", "stop", "length")
    metrics.reports = lambda: [Report()]
    alone = ApiMetrics()
    alone.registry, alone.between_tokens_s = metrics.registry, metrics.between_tokens_s
    assert metrics.render() == alone.render()


def test_metrics_have_no_creation_times() -> None:
    """They double the number of series, and those of several processes cannot be added."""
    assert not [line for line in lines(counted("stop")) if "_created" in line]


def test_reports_of_a_process_that_has_died_are_kept() -> None:
    """Counters never go back: its counts are added to those of the remaining processes."""
    gone = Report(0, added([counted("stop", "").report(), counted("stop").report()]))
    own = counted("stop")
    own.reports = lambda: [gone]
    assert 'vsched_requests_total{endpoint="chat",outcome="stop"} 3.0' in lines(own)
    assert own.under_way == 0
