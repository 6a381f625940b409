"""`python -m tests.bench.parts kernel` works with any number of events."""

from __future__ import annotations

import pytest

from tests.bench.parts.kernel.measure import measure_arrival, measure_decode, measure_request
from vsched.testing import default_policies


@pytest.mark.parametrize(("running", "steps"), [(1, 1), (1, 20), (64, 20), (96, 3)])
def test_decode_steps_are_measured_with_as_few_events_as_are_requested(
    running: int, steps: int
) -> None:
    row = measure_decode(default_policies(), running, steps=steps, repeats=1)
    assert (row.running, row.events) == (running, steps)
    assert 0 < row.p50_us <= row.p99_us


def test_requests_come_and_go_while_they_are_measured() -> None:
    whole = measure_request(default_policies(), requests=4, repeats=2)
    arrival = measure_arrival(default_policies(), requests=4, repeats=2)
    assert whole.events == arrival.events == 8
    assert arrival.case == "arrival of 8 images, 2,300 tokens"
