"""Deadlines for reports of ranks, and liveness while one process serves two groups."""

from __future__ import annotations

import pytest

from tests.unit.aio.leader.leader_harness import LIMITS
from vsched.aio.leader import FailureDetector, ProcessLiveness
from vsched.failures import RankSilent

SILENT_S = LIMITS.rank_timeout_s + LIMITS.heartbeat_s
FIRST_S = 1000.0


@pytest.fixture
def liveness() -> ProcessLiveness:
    liveness = ProcessLiveness()
    liveness.receive(0, FIRST_S, follows=True)
    return liveness


def detector(liveness: ProcessLiveness, group: str = "generate") -> FailureDetector:
    return FailureDetector(group, 1, LIMITS, liveness)


def test_detector_rank_at_work_for_another_group_is_not_silent(liveness: ProcessLiveness) -> None:
    """A rank follows one log at a time; once no report is due, it must be heard from again."""
    encodes, generates = detector(liveness, "encode"), detector(liveness)
    late_s = FIRST_S + SILENT_S + 1
    encodes.expect(1, FIRST_S)
    encodes.expect(2, FIRST_S)
    for _ in range(2):
        liveness.receive(0, late_s, follows=False)
        assert generates.failure(late_s) is None
        encodes.answered(0, late_s)
    assert isinstance(generates.failure(late_s), RankSilent)


@pytest.mark.parametrize(
    ("hook", "number", "renewed"), [("", 7, True), ("", 8, False), ("balance", 7, False)]
)
def test_detector_renews_the_time_of_the_step_that_paused(
    liveness: ProcessLiveness, hook: str, number: int, *, renewed: bool
) -> None:
    """Not the time of another step, nor of a hook at a log position of the same number."""
    detects = detector(liveness)
    detects.expect(7, FIRST_S, hook=hook)
    now_s = FIRST_S + LIMITS.step_s + 1
    liveness.receive(0, now_s, follows=False)
    detects.renew(number, now_s)
    assert (detects.failure(now_s) is None) == renewed
