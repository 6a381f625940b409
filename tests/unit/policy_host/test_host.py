"""A host of policies: seats, needs of policies, guards, call times, figures, notices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.unit.kernel.setups import answering
from vsched.errors import PolicyError
from vsched.policy import Admission, AdmissionView, Policy, RequestPolicy, StepShares, StepView
from vsched.policy_host import HostCapabilities, PolicyHost, SeatPolicies, check_capabilities
from vsched.policy_host.call_times import PolicyTimes
from vsched_policies.preemption import SwapLong, Youngest

STEP = "generate.step"
MS = 1_000_000
VIEW = StepView(now_ns=0, prefilling=(), waiting=0, decodes=0, tokens_free=1)


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

    def ask(
        self, took_ms: int, queued_ms: int = 0, answer: object = "ok"
    ) -> Callable[[object], Any]:
        def ask(_: object) -> object:
            self.now_ns += took_ms * MS
            self.queued_ns += queued_ms * MS
            return answer

        return ask


def make_host(**more: dict[str, str]) -> PolicyHost:
    """A host of a policy that takes twice the budget."""
    clock = Clock()
    return PolicyHost(
        SeatPolicies(by_table={STEP: answering("step", clock.ask(10, answer=StepShares(())))}),
        now_ns=lambda: clock.now_ns,
        log=logging.getLogger("host"),
        budget_ms=5,
        slow_max=1,
        **more,
    )


def test_slow_policy_is_replaced_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    host = make_host()
    seat = host.seat(STEP)
    assert seat is not None
    for _ in range(5):
        seat.decide(VIEW, 0)
    figures = host.figures()
    assert figures["policy_calls"][STEP]["calls"] == 2
    assert figures["policy_replaced"].keys() == {STEP}
    assert "the default decides from now on as generate.step" in caplog.text


def test_failure_of_the_host_itself_is_logged_once_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = make_host()
    assert host.guard("adding", lambda a: a + 1, 2) == 3
    for _ in range(3):
        assert host.guard("dividing", lambda: 1 // 0) is None
    assert host.figures()["host_faults"] == {"dividing": 3}
    assert caplog.text.count("dividing failed") == 1


def test_table_without_a_hook_has_no_seat(caplog: pytest.LogCaptureFixture) -> None:
    host = make_host(switched_off={STEP: "this version has no hook"})
    assert host.seat(STEP) is None
    assert "generate.step: no policy decides: this version has no hook" in caplog.text


def test_calls_are_counted_and_answers_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    times = clock.times(budget_ms=5, slow_max=2)
    with caplog.at_level(logging.WARNING):
        assert times.watch("s", clock.ask(0, answer="quick"))("view") == "quick"
        ask = times.watch("s", clock.ask(7, answer="slow"))
        assert [ask("view") for _ in range(2)] == ["slow", "slow"]
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
    took_ms = 1
    ask = times.watch("s", lambda view: clock.ask(took_ms)(view))
    for number in range(600):
        took_ms = 9 if number % 50 == 0 else 1
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


PLAIN = HostCapabilities(
    host="Plain 1.0",
    tables=frozenset({"generate.admission", "generate.preemption"}),
    refused={"generate.step": "its steps are fixed"},
    features=frozenset({"hold"}),
)


class Preempts(RequestPolicy, frozen=True, kw_only=True):
    preempts = True

    def admit(self, view: AdmissionView) -> Admission:
        return Admission()


class Levitates(Preempts, frozen=True, kw_only=True):
    def needs(self) -> Sequence[str]:
        return ("levitation",)


@pytest.mark.parametrize(
    ("policy", "table", "sentence"),
    [
        (Preempts(), "generate.step", "not decided by a policy in Plain 1.0: its steps are fixed"),
        (Preempts(), "routing", "decision itself. .* or use Preempts in generate.admission"),
        (Preempts(), "generate.admission", r"needs preemption .*, which Plain 1.0 does not have"),
        (Levitates(), "generate.admission", "'levitation', which is none of hold"),
        (SwapLong(), "generate.preemption", "SwapLong needs swap space"),
        (Youngest(mode="swap"), "generate.preemption", r"Youngest needs .*\(swap\)"),
    ],
)
def test_host_refuses_policies_that_it_cannot_follow(
    policy: Policy, table: str, sentence: str
) -> None:
    with pytest.raises(PolicyError, match=sentence):
        check_capabilities(policy, table, PLAIN)
    check_capabilities(Youngest(), "generate.preemption", PLAIN)
    check_capabilities(Preempts(), "generate.preemption", PLAIN)  # it never admits there
