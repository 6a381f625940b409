"""Metrics of several processes are reported as if of one."""

from __future__ import annotations

import msgspec

from vsched.api.metrics import ApiMetrics
from vsched.api.metrics.requests import Report, added


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


def test_reports_change_nothing_where_there_is_one_process() -> None:
    metrics = counted("stop", "stop", "length")
    metrics.reports = lambda: [Report()]
    from prometheus_client import generate_latest

    assert metrics.render() == generate_latest(metrics.registry)


def test_reports_tell_the_first_beginning() -> None:
    """The creation time of a counter is a time; times are not added."""
    first, second = counted("stop"), counted("stop")

    def made(families: list[object]) -> list[float]:
        return [
            value
            for family in families
            for name, _, value in family.samples  # type: ignore[attr-defined]
            if name == "vsched_requests_created"
        ]

    ((one,), (other,)) = made(first.report().families), made(second.report().families)  # type: ignore[arg-type]
    assert made(added([second.report(), first.report()])) == [min(one, other)]  # type: ignore[arg-type]


def test_reports_of_a_process_that_has_died_are_kept() -> None:
    """Counters never go back: its counts are added to those of the remaining processes."""
    gone = Report(0, added([counted("stop", "").report(), counted("stop").report()]))
    own = counted("stop")
    own.reports = lambda: [gone]
    assert 'vsched_requests_total{endpoint="chat",outcome="stop"} 3.0' in lines(own)
    assert own.under_way == 0
