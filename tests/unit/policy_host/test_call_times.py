"""Policy calls are timed, and a policy that is too slow is replaced, in the kernel through an event."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from vsched.kernel import SchedulerLimits
from vsched.kernel.events import PolicyReplaced
from vsched.policy import Admission, AdmissionView, RequestPolicy
from vsched.policy_host.call_times import PolicyTimes
from vsched.testing import ModelCluster, make_request
from vsched.testing.cluster import default_policies

LIMITS = SchedulerLimits(blocks=64, slots=2, context_tokens=256, pages=16)
MS = 1_000_000
SEAT = "generate.admission"


class OneAtATime(RequestPolicy, frozen=True, kw_only=True):
    """Admit one request where two could join; the default admits both."""

    def admit(self, view: AdmissionView) -> Admission:
        return Admission([0] if view.running == 0 else [])


class Clock:
    """A clock that advances by a fixed time with each policy call."""

    def __init__(self) -> None:
        self.now_ns = self.queued_ns = 0
        self.received: list[tuple[str, str]] = []

    def times(self, *, budget_ms: float, slow_max: int) -> PolicyTimes:
        return PolicyTimes(
            budget_ms=budget_ms,
            slow_max=slow_max,
            now_ns=lambda: self.now_ns,
            replace=lambda seat, reason: self.received.append((seat, reason)),
            queued_ns=lambda: self.queued_ns,
        )

    def ask(self, took_ms: int, queued_ms: int = 0) -> Callable[[object], int]:
        def ask(_: object) -> int:
            self.now_ns += took_ms * MS
            self.queued_ns += queued_ms * MS
            return took_ms

        return ask


def test_calls_are_counted_and_answers_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    times = clock.times(budget_ms=5, slow_max=2)
    with caplog.at_level(logging.WARNING):
        assert [times.watch("s", clock.ask(took))("view") for took in (3,)] == [3]
        ask = times.watch("s", clock.ask(7))
        assert [ask("view") for _ in range(2)] == [7, 7]
    assert times.statistics() == {"s": {"calls": 2, "seconds": 0.014, "longest_ms": 7.0, "slow": 2}}
    assert "value 7.0 ms, limit 5 ms. Remedy: make it faster" in caplog.text
    assert clock.received == []
    ask("view")
    (change,) = clock.received
    assert change[0] == "s"
    assert "3 of 3 calls" in change[1]


def test_slow_calls_that_are_rare_replace_nothing() -> None:
    clock = Clock()
    times = clock.times(budget_ms=5, slow_max=2)
    took = [1]
    ask = times.watch("s", lambda view: clock.ask(took[0])(view))
    for number in range(600):
        took[0] = 9 if number % 50 == 0 else 1
        ask("view")
    assert times.statistics()["s"]["slow"] == 12
    assert clock.received == []


@pytest.mark.parametrize(("queued_ms", "slow"), [(95, 0), (96, 0), (94, 1)])
def test_waits_for_a_core_replace_nothing(queued_ms: int, slow: int) -> None:
    """Next to busy processes, quick policies wait long for a core; that time is not counted."""
    clock = Clock()
    times = clock.times(budget_ms=5, slow_max=0)
    times.watch("s", clock.ask(100, queued_ms))("view")
    assert times.statistics()["s"]["slow"] == slow
    assert len(clock.received) == slow


def two_requests(cluster: ModelCluster) -> int:
    """Submit two requests at once and return the maximum number that run together."""
    cluster.submit(make_request("a", [1, 2, 3]))
    cluster.submit(make_request("b", [1, 2, 4]))
    cluster.run_generate()
    running = cluster.kernel.generators[0].slots_held
    cluster.drain()
    cluster.check_settled()
    return running


def replaced() -> ModelCluster:
    cluster = ModelCluster(LIMITS, default_policies(generate_admission=OneAtATime()))
    assert two_requests(cluster) == 1
    cluster.requests.clear()
    cluster.ended.clear()
    cluster.send(PolicyReplaced(SEAT, "too slow"))
    return cluster


def test_the_default_decides_in_place_of_a_policy_that_was_replaced() -> None:
    cluster = replaced()
    assert cluster.notices == [f"the default decides from now on as {SEAT}: too slow"]
    assert two_requests(cluster) == 2
    statistics = cluster.kernel.statistics()
    assert statistics["policy_replaced"] == {SEAT: "too slow"}
    assert statistics["policy_faults"] == {}
    cluster.send(PolicyReplaced(SEAT, "again"))
    cluster.send(PolicyReplaced("nowhere", "?"))
    assert len(cluster.notices) == 1
