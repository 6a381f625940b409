"""Settings of property tests, the same examples every time and no files left behind; cases for `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

REPEATABLE = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def thorough(*cases: Any) -> list[Any]:
    """Return further cases of a parametrized test, values or tuples, marked `thorough`."""
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.thorough)
        for each in cases
    ]


def usually(*few: str, of: Iterable[str]) -> list[Any]:
    """Return the cases of a parametrized test: all of some names, of which `make test` runs a few."""
    return [*few, *thorough(*(name for name in of if name not in few))]
