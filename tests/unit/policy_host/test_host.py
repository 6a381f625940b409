"""A host's seats with what is around them: guards, figures, notices."""

from __future__ import annotations

import logging

import pytest

from vsched.policy import RequestPolicy, StepShares, StepView
from vsched.policy_host import PolicyHost, SeatPolicies

STEP = "generate.step"
VIEW = StepView(now_ns=0, prefilling=(), waiting=0, decodes=0, tokens_free=1)


class Clocked(RequestPolicy, frozen=True, kw_only=True):
    def share(self, view: StepView) -> StepShares:
        CLOCK[0] += 10_000_000
        return StepShares(())


CLOCK = [0]


def make_host(**more: dict[str, str]) -> PolicyHost:
    return PolicyHost(
        SeatPolicies(by_table={STEP: Clocked()}),
        now_ns=lambda: CLOCK[0],
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
