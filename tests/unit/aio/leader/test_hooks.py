"""Periodic collective work is due by interval, never in every iteration, never while idle."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.aio.leader.leader_harness import LIMITS, LeaderHarness
from vsched.aio.leader import HookTimes
from vsched.kernel.decisions import GenerateDecision
from vsched.wire import Beat, GenerateResult, Heartbeat, RunHook, StepCheck, check_of


@pytest.fixture
async def led(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LeaderHarness]:
    led = LeaderHarness(monkeypatch, ranks=2)
    yield led
    led.leader.close()


def result(step: int) -> GenerateResult:
    return GenerateResult(step, b"", b"", [], [], 0)


def run(hooks: HookTimes, now_s: float) -> list[str]:
    """Run all due hooks at once."""
    due = hooks.take_due(now_s)
    for name in due:
        hooks.done(name, now_s)
    return due


def test_hooks_are_due_after_their_intervals() -> None:
    """Each by its own interval, whatever the number of steps."""
    hooks = HookTimes({"balance": 10.0, "tidy": 25.0}, 0.0)
    ran = []
    for tenth in range(600):
        hooks.stepped()
        ran += [(name, tenth // 10) for name in run(hooks, tenth / 10)]
    assert [at for name, at in ran if name == "balance"] == [10, 20, 30, 40, 50]
    assert [at for name, at in ran if name == "tidy"] == [25, 50]


def test_hooks_of_an_idle_group_rest() -> None:
    """Without a step since the last run nothing has changed; the next step makes the hook due."""
    hooks = HookTimes({"balance": 10.0}, 0.0)
    assert run(hooks, 100.0) == []
    hooks.stepped()
    assert run(hooks, 101.0) == ["balance"]
    assert run(hooks, 1000.0) == []


def test_hooks_that_run_are_not_due_again() -> None:
    """The interval starts at the end of the last run, however long that took."""
    hooks = HookTimes({"balance": 10.0}, 0.0)
    hooks.stepped()
    assert hooks.take_due(10.0) == ["balance"]
    hooks.stepped()
    assert hooks.take_due(30.0) == []
    hooks.done("balance", 31.0)
    assert hooks.take_due(40.0) == []
    assert hooks.take_due(41.0) == ["balance"]


async def test_leader_puts_due_hooks_before_a_step(led: LeaderHarness) -> None:
    """Every rank runs the hook between the same two steps; most steps have no hook before them."""
    led.enter(0, 1, hooks={"balance": 10.0})
    for step in range(1, 31):
        led.leader.decide(GenerateDecision(step))
        for seq, entry in enumerate(led.entries(), 1):
            if entry == RunHook("balance") and seq >= len(led.entries()) - 1:
                led.receive(0, Beat(seq, {}))
        led.receive(0, result(step))
        led.advance(1)
    entries = [entry for entry in led.entries() if entry != Heartbeat()]
    steps_before = [at for at, entry in enumerate(entries) if isinstance(entry, RunHook)]
    assert steps_before == [10, 21], "the tenth step after each, and nothing since"
    assert led.link.sent[0] == led.link.sent[1]
    assert led.lost == []


async def test_leader_runs_no_hook_in_an_idle_group(led: LeaderHarness) -> None:
    """Heartbeats are sent, and nothing else."""
    led.enter(0, 1, hooks={"balance": 1.0})
    for _ in range(60):
        led.loop.advance(1)
        for rank in (0, 1):
            led.receive(rank, Beat(len(led.link.sent.get(rank, [])), {}))
    assert set(map(type, led.entries())) == {Heartbeat}
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
