"""Periodic collective work is due by interval, never in every iteration, never while idle."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.aio.leader.leader_harness import LIMITS, LeaderHarness
from vsched.kernel.decisions import GenerateDecision
from vsched.wire import Beat, GenerateResult, Heartbeat, RunHook, StepCheck, check_of


@pytest.fixture
async def led(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LeaderHarness]:
    led = LeaderHarness(monkeypatch, ranks=2)
    yield led
    led.leader.close()


def result(step: int) -> GenerateResult:
    return GenerateResult(step, b"", b"", [], [], 0)


async def test_leader_puts_due_hooks_before_a_step(led: LeaderHarness) -> None:
    """Every rank runs a hook between the same two steps, an interval after the end of its last run."""
    led.enter(0, 1, hooks={"balance": 10.0, "tidy": 25.0})
    ran: list[tuple[str, int]] = []
    for step in range(1, 41):
        known = len(led.entries())
        led.leader.decide(GenerateDecision(step))
        for seq, entry in enumerate(led.entries()[known:], known + 1):
            if isinstance(entry, RunHook):
                ran.append((entry.name, step))
                led.advance(3 if step == 21 else 0)
                for rank in (0, 1):
                    led.receive(rank, Beat(seq, {}))
        led.receive(0, result(step))
        led.receive(1, StepCheck(step, check_of(result(step))))
        led.advance(1)
    assert [step for name, step in ran if name == "balance"] == [11, 21, 31]
    assert [step for name, step in ran if name == "tidy"] == [23]
    assert led.link.sent[0] == led.link.sent[1]
    assert led.lost == []


async def test_leader_runs_no_hook_that_runs_or_in_an_idle_group(led: LeaderHarness) -> None:
    """After a step a hook is due once; then heartbeats are sent, and nothing else."""
    led.enter(0, 1, hooks={"balance": 1.0})
    for steps in range(3):
        before = led.entries().count(RunHook("balance"))
        for seq in range(60):
            led.loop.advance(1)
            for rank in (0, 1):
                led.receive(rank, Beat(len(led.link.sent.get(rank, [])), {}))
            if seq == 10 and steps:
                led.leader.decide(GenerateDecision(steps))
                led.receive(0, result(steps))
                led.receive(1, StepCheck(steps, check_of(result(steps))))
        assert led.entries().count(RunHook("balance")) == before + bool(steps)
    assert {*map(type, led.entries())} == {Heartbeat, RunHook, GenerateDecision}
    assert led.lost == []


async def test_leader_deadline_of_a_hook(led: LeaderHarness) -> None:
    """A hook that does not end is subject to the step deadline."""
    led.enter(0, 1, hooks={"balance": 1.0})
    led.leader.decide(GenerateDecision(1))
    led.receive(0, result(1))
    led.advance(LIMITS.heartbeat_s + 1)
    assert led.entries()[-1] == RunHook("balance")
    led.advance(LIMITS.step_s + 2 * LIMITS.heartbeat_s)
    assert "limit 30 (deadlines.step_s)" in led.lost[0]


async def test_leader_answer_to_a_heartbeat_is_none_to_a_hook(led: LeaderHarness) -> None:
    """A reply to a heartbeat that was sent before the hook may arrive after it."""
    led.enter(0, 1, hooks={"balance": 1.0})
    led.leader.decide(GenerateDecision(1))
    for rank in (0, 1):
        led.receive(rank, result(1) if rank == 0 else StepCheck(1, check_of(result(1))))
    led.advance(LIMITS.heartbeat_s + 1)
    seq = led.entries().index(RunHook("balance")) + 1
    for rank in (0, 1):
        led.receive(rank, Beat(seq - 1, {}))
    led.advance(LIMITS.step_s + 2 * LIMITS.heartbeat_s)
    assert "limit 30 (deadlines.step_s)" in led.lost[0]


async def test_leader_result_is_no_answer_to_the_hook_at_a_place_of_the_same_number(
    led: LeaderHarness,
) -> None:
    led.enter(0, 1, hooks={"balance": 1.0})
    led.leader.decide(GenerateDecision(1))
    led.receive(0, result(1))
    led.advance(LIMITS.heartbeat_s + 1)
    seq = led.entries().index(RunHook("balance")) + 1
    led.receive(0, result(seq))
    assert led.lost == ["generate: rank 0 sent a result of no step that is out"]


async def test_leader_runs_what_is_due_by_its_interval_before_a_step_and_not_after_a_result(
    led: LeaderHarness,
) -> None:
    """A result may trigger the next step at once; a hook that is due runs right before that step."""
    led.enter(0, 1, hooks={"balance": LIMITS.heartbeat_s / 4})
    led.leader.decide(GenerateDecision(1))
    led.loop.advance(LIMITS.heartbeat_s / 2)
    led.receive(0, result(1))
    assert led.entries() == [GenerateDecision(1)]
    led.leader.decide(GenerateDecision(2))
    assert led.entries() == [GenerateDecision(1), RunHook("balance"), GenerateDecision(2)]
