"""The same seed gives the same digest, and memory does not grow with the number of requests."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import pytest

from tests.unit.sim.shapes import COST, SCARCE, arrival, config, scarce
from vsched.sim.fast import metrics
from vsched.sim.fast.simulation import simulate
from vsched.sim.workload.requests import Arrival, Image, Text, Workload


def test_run_twice_is_the_same() -> None:
    one, same, other = (simulate(config(*SCARCE), scarce(seed), cost=COST) for seed in (5, 5, 6))
    assert one.digest == same.digest != other.digest
    assert (one.figures, one.cdf) == (same.figures, same.cdf)
    assert one.series == same.series


def test_run_with_an_observer_is_the_same() -> None:
    class Nobody:
        def see(self, *_: object) -> None:
            pass

    one, same = (
        simulate(config(*SCARCE), scarce(5), cost=COST, observers=observers)
        for observers in ([], [Nobody()])
    )
    assert one.digest == same.digest


@pytest.mark.slow
def test_run_memory_does_not_grow_with_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the requests at the same rate take the same memory at the peak."""
    monkeypatch.setattr(metrics, "SAMPLES_MAX", 16)  # a bound that short runs reach, too
    small = config("arena.embedding_bytes=100000", "arena.pixel_bytes=100000")

    def peak(requests: int) -> int:
        def arrivals() -> Iterator[Arrival]:
            for number in range(requests):
                if number % 50 == 0:
                    gc.collect()  # here, and not when the objects of other tests trigger it
                yield arrival(number, 20 * number, Text(number, 40), Image(f"{number}", 20))

        tracemalloc.start()
        try:
            outcome = simulate(small, Workload("alike", arrivals), cost=COST)
            assert outcome.figures.finished == requests
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        peak(20)
        # Python itself keeps some freed tuples and numbers; a kept object of a hundred bytes a request would show.
        assert peak(1000) < 1.1 * peak(300)
    finally:
        gc.enable()
