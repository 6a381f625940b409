"""Settings of property tests: the same examples every time, and no files left behind."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

REPEATABLE = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
