"""Random schedules, faults and cancellations under the default policies: nothing is lost, wrong or stuck."""

from __future__ import annotations

import random

import msgspec
import pytest

from vsched.testing import run_random
from vsched.testing.cluster import random_limits


@pytest.mark.parametrize("seed", range(15))
def test_scheduler_serves_or_refuses_everything(seed: int) -> None:
    """One terminal reply for all, right outputs, and a drained kernel holds nothing."""
    cluster = run_random(random.Random(seed), events=120)
    assert cluster.requests.keys() == cluster.ended.keys() | cluster.refused.keys()
    assert not cluster.kernel.statistics()["policy_faults"]


@pytest.mark.parametrize("seed", range(8))
def test_scheduler_serves_text_without_encoders(seed: int) -> None:
    """Requests with images are refused; the others are served, and lost groups do not end them all."""
    rng = random.Random(seed)
    limits = msgspec.structs.replace(
        random_limits(rng), encoders=0, pages=0, generators=2, encode_pauses=False
    )
    cluster = run_random(rng, limits=limits, events=120)
    assert cluster.requests.keys() == cluster.ended.keys() | cluster.refused.keys()
    with_images = {name for name, request in cluster.requests.items() if request.items}
    assert with_images <= cluster.refused.keys()
