"""`python -m tests.bench.parts memory`: the verdicts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.bench.parts.memory import MemoryRun, Verdict


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"served": 3}, "kept"),
        ({"served": 3, "lost": Counter(group_lost=1)}, "broken"),
        ({"served": 3, "losses": 1}, "broken"),
        ({"lost": Counter(encode_failed=1)}, "broken"),
        ({"failure": "no room"}, "no start"),
        ({}, "inconclusive"),
        ({"refusals": Counter(too_large=5)}, "inconclusive"),
    ],
)
def test_memory_run_reports_no_more_than_was_seen(
    changes: dict[str, Any], verdict: Verdict
) -> None:
    """If nothing finished, the result is inconclusive."""
    assert MemoryRun(**changes).verdict == verdict
