"""Warnings of reports: a load above the capacity, and a trace too short for a steady state."""

from __future__ import annotations

import pytest

from tests.unit.sim.shapes import COST, arrival, config
from vsched.sim.fast.metrics import SimulationOutcome
from vsched.sim.fast.simulation import simulate
from vsched.sim.report.rendering import load_warning, render_html
from vsched.sim.workload.requests import workload_of


def outcome_at(every_ms: float, *sets: str, requests: int = 300) -> SimulationOutcome:
    """Return the outcome of equal requests that arrive at a rate; a slot serves one in 40 ms."""
    arrivals = [arrival(number, number * every_ms, outputs=30) for number in range(requests)]
    return simulate(
        config("generate.slots=1", *sets), workload_of("steady", arrivals), cost=COST, label="one"
    )


def test_no_warning_below_the_capacity() -> None:
    outcome = outcome_at(60.0)
    assert outcome.figures.generate_busy > 0.5
    assert load_warning(outcome) == ""


def test_overload_names_the_growth_of_the_queue() -> None:
    outcome = outcome_at(25.0)
    warning = load_warning(outcome)
    assert warning.startswith("Overload: 40.1 requests arrived per second, and the queue grew by ")
    assert f"{max(outcome.series.gauges['waiting']):,.0f} requests" in warning
    html = render_html([outcome])
    assert 'role="note"' in html
    assert warning in html


def test_overload_names_requests_refused_by_a_full_queue() -> None:
    outcome = outcome_at(25.0, "generate.max_waiting=5")
    refused = outcome.figures.failed["queue_full"]
    assert f"{refused:,} of 300 requests were refused" in load_warning(outcome)


def test_short_trace_may_end_before_a_steady_state() -> None:
    assert load_warning(outcome_at(60.0, requests=4)).startswith(
        "Short: requests arrived for 0.2 s"
    )


@pytest.mark.parametrize("requests", [0, 1])
def test_no_arrivals_are_no_overload(requests: int) -> None:
    assert not load_warning(outcome_at(60.0, requests=requests)).startswith("Overload")
