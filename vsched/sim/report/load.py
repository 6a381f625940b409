"""Check of a workload against a configuration: overload, or too short for a steady state."""

from __future__ import annotations

from vsched.kernel.commands import RefusalCode
from vsched.sim.fast.metrics import SimulationOutcome

GROWTH_MIN = 0.05
"""Share of the arrivals that stay in the queue, from which on the load counts as overload."""
WAITING_MIN = 10
"""Number of waiting requests below which a queue does not count as overload."""
REFUSED_MIN = 0.01
"""Share of requests refused by a full queue, from which on the load counts as overload."""
LENGTHS_MIN = 10
"""Duration of a workload, in median durations of a request, below which it is short."""


def load_warning(outcome: SimulationOutcome) -> str:
    """Return a sentence if the load exceeds the capacity, or if the workload is too short to say; else nothing."""
    return _full_queue(outcome) or _growing_queue(outcome) or _short(outcome)


def _full_queue(outcome: SimulationOutcome) -> str:
    refused = outcome.figures.failed.get(RefusalCode.QUEUE_FULL, 0)
    if refused < max(REFUSED_MIN * outcome.figures.requests, 1):
        return ""
    return (
        f"Overload: the queue was full, and {refused:,} of {outcome.figures.requests:,} requests were refused. "
        "The latencies are those of the others."
    )


def _growing_queue(outcome: SimulationOutcome) -> str:
    """Compare the mean queue in each third of the time in which requests arrive."""
    figures, series = outcome.figures, outcome.series
    first_s, last_s = figures.arrivals_s
    start, stop = (int(at_s / series.interval_s) for at_s in figures.arrivals_s)
    waiting = series.gauges["waiting"][start : stop + 1]
    size = len(waiting) // 3
    if size == 0:
        return ""
    early, middle, late = (sum(waiting[size * k : size * (k + 1)]) / size for k in range(3))
    growth = min(middle - early, late - middle) / (figures.requests / 3)
    if growth < GROWTH_MIN or late < WAITING_MIN:
        return ""
    rate = figures.requests / (last_s - first_s)
    after_s = figures.span_s - (last_s - first_s)
    return (
        f"Overload: {rate:,.3g} requests arrived per second, and the queue grew by {growth * rate:,.2g} per second, to "
        f"{max(waiting):,.0f} requests; the last request ended {after_s:,.0f} s after the last arrival. "
        "A longer trace has higher latencies."
    )


def _short(outcome: SimulationOutcome) -> str:
    figures = outcome.figures
    first_s, last_s = figures.arrivals_s
    median_s = figures.e2e_ms.p50 / 1e3
    if not figures.finished or last_s - first_s >= LENGTHS_MIN * median_s:
        return ""
    return (
        f"Short: requests arrived for {last_s - first_s:,.1f} s, and the median request took {median_s:,.1f} s. "
        "The trace may end before a steady state; a longer one can have higher latencies."
    )
