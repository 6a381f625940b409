"""Figures: sketches are close to the exact ones, and nothing grows with the number of requests."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from vsched.sim.fast.metrics import SAMPLE_NS, SAMPLES_MAX, SUMS, Sampler, Sketch


def filled(values: list[int]) -> Sketch:
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    return sketch


@pytest.mark.parametrize("seed", range(4))
def test_sketch_quantiles_are_close(seed: int) -> None:
    rng = Random(seed)
    values = [int(rng.lognormvariate(rng.uniform(2, 22), 2)) for _ in range(5000)]
    sketch = filled(values)
    for share in (0.5, 0.95, 0.99):
        exact = float(np.percentile(values, share * 100, method="inverted_cdf"))
        assert sketch.quantile(share) == pytest.approx(exact, rel=0.008, abs=1)
    assert sketch.mean == pytest.approx(np.mean(values), rel=0.005, abs=1)
    assert sketch.count == 5000


def test_sampler_keeps_a_bounded_number_of_samples_and_every_sum() -> None:
    sampler = Sampler(0)
    steps = 5 * SAMPLES_MAX + 7
    for step in range(1, steps + 1):
        totals = [step * (column + 1) for column in range(len(SUMS))]
        sampler.take(step * SAMPLE_NS, (1.0, step, 0.0, 0.5, 0.0), totals)
    series = sampler.series()
    assert SAMPLES_MAX / 2 <= len(series.gauges["waiting"]) < SAMPLES_MAX
    taken = len(series.gauges["waiting"]) * series.interval_s * 1e9 / SAMPLE_NS
    assert sum(series.sums["steps"]) == taken
    assert sum(series.sums["decode_tokens"]) == 2 * taken
    assert set(series.gauges["waiting"]) == {1.0}
    assert series.gauges["running"] == sorted(series.gauges["running"])
