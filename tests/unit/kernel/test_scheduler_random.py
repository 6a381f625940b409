"""Random schedules, faults and cancellations under the default policies: nothing is lost, wrong or stuck."""

from __future__ import annotations

import random

import pytest

from vsched.testing import run_random


@pytest.mark.parametrize("seed", range(150))
def test_scheduler_serves_or_refuses_everything(seed: int) -> None:
    """One terminal reply for all, right outputs, and a drained kernel holds nothing."""
    cluster = run_random(random.Random(seed), events=120)
    assert cluster.requests.keys() == cluster.ended.keys() | cluster.refused.keys()
    assert not cluster.kernel.statistics()["policy_faults"]
