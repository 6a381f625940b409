"""Between the steps of a leader: time slices of an encode batch, and hooks, which are due by interval."""

from __future__ import annotations

import pytest

from tests.unit.aio.leader.leader_harness import LIMITS, LeaderHarness, said
from vsched.aio.leader import EncodeSlices, ProcessLiveness
from vsched.failures import EncodeErrorKind
from vsched.kernel.decisions import EncodeDecision, EncodeTask, GenerateDecision
from vsched.types import Extent
from vsched.wire import (
    AdapterChanged,
    AddAdapter,
    Continue,
    EncodeResult,
    Heartbeat,
    LogEntry,
    Paused,
    RemoveAdapter,
    RunHook,
    StepCheck,
)

MS = 1_000_000


def batch(step: int, *tokens: int, time_slice_ms: int = 100) -> EncodeDecision:
    """A batch of images with these token counts."""
    tasks = [EncodeTask(b"%d" % one, one, Extent(0, 8), [0]) for one in tokens]
    return EncodeDecision(step, tasks, time_slice_ms * MS)


def layers(entries: list[LogEntry]) -> list[int]:
    return [one.layers for one in entries if isinstance(one, EncodeDecision | Continue)]


@pytest.fixture
async def led() -> LeaderHarness:
    return LeaderHarness(2, name="encode").enter(hooks={"balance": 10.0})


def test_encode_slices_follow_the_times_of_parts() -> None:
    """The first slice is one layer; later ones hold as many as fit, given the tokens of the batch, and at least one."""
    encode_slices = EncodeSlices()
    assert encode_slices.begin_batch(batch(1, 200)).layers == 1
    assert encode_slices.take_pause(Paused(1, 1, 20 * MS)) == 5
    assert encode_slices.take_pause(Paused(1, 5, 125 * MS)) == 4, "25 ms each by now"
    assert encode_slices.take_pause(Paused(1, 4, 40 * MS)) == 4, "others like them may come"
    assert encode_slices.busy_ns == 185 * MS
    assert encode_slices.end_batch()
    assert encode_slices.begin_batch(batch(2, 400)).layers == 2, "twice the tokens"
    assert encode_slices.begin_batch(batch(2, 50)).layers == 4, "these may be whole layers"
    assert encode_slices.begin_batch(batch(3, 100_000)).layers == 1
    assert encode_slices.begin_batch(batch(4, 100, time_slice_ms=1000)).layers == 40
    assert encode_slices.take_pause(Paused(4, 80, 400 * MS)) == 200, "another batch, another cost"
    encoded = EncodeDecision(5, [EncodeTask(b"", 200, Extent(0, 8), [0], encoded=True)], MS)
    assert encode_slices.begin_batch(encoded) == encoded, "nothing to compute"
    assert not encode_slices.end_batch()


async def test_leader_sends_time_slices_between_the_steps_of_the_other_group() -> None:
    """Each time slice comes after the steps that were decided while the previous slice ran."""
    liveness = ProcessLiveness()
    encode = LeaderHarness(name="encode", liveness=liveness).enter()
    generate = LeaderHarness(liveness=liveness, loop=encode.loop).enter()
    encode.leader.decide(batch(1, 200))
    generate.decide(1)
    encode.receive(0, Paused(1, 1, 50 * MS))
    generate.decide(2)
    encode.receive(0, Paused(1, 2, 100 * MS))
    encode.receive(0, EncodeResult(1, None, 0))
    assert layers(encode.entries()) == [1, 2, 2]
    assert [encode.turns(), generate.turns()] == [[1, 3, 5], [2, 4]]
    assert (encode.lost, encode.results) == ([], [EncodeResult(1, None, 0)])


async def test_leader_has_the_others_go_on_when_the_first_rank_failed(led: LeaderHarness) -> None:
    """A rank waiting for its next layer has to reach the point of the failure, and then fails there as well."""
    led.leader.decide(batch(1, 200))
    led.receive(0, EncodeResult(1, EncodeErrorKind.FAILED, 0))
    assert led.entries(rank=1)[-1] == Continue(1, 0)
    led.receive(1, StepCheck(1, b"failed"))
    led.leader.decide(batch(2, 200))
    led.receive(0, EncodeResult(2, None, 0))
    assert isinstance(led.entries(rank=1)[-1], EncodeDecision), "no rank waits"
    assert led.lost == []


@pytest.mark.parametrize(
    ("slice_ms", "rank", "paused"),
    [
        (100, 1, Paused(1, 1, MS)),
        (100, 0, Paused(2, 1, MS)),
        (100, 0, Paused(1, 0, MS)),
        (0, 0, Paused(1, 1, MS)),
    ],
)
async def test_leader_gives_up_a_rank_that_pauses_out_of_order(
    led: LeaderHarness, slice_ms: int, rank: int, paused: Paused
) -> None:
    """Only the first rank may report a pause, of the step in flight, with progress, and of no whole batch."""
    led.leader.decide(batch(1, 200, time_slice_ms=slice_ms))
    assert layers(led.entries()) == [bool(slice_ms)]
    led.receive(rank, paused)
    assert led.lost == [
        f"encode: rank {rank} paused in step {paused.step}, which is not encoded in time slices"
    ]


async def test_leader_gives_each_stretch_the_time_of_a_step(led: LeaderHarness) -> None:
    """Steps of the other group may come in between; a rank that hangs in one time slice is still detected."""
    led.leader.decide(batch(1, 200))
    for _ in range(3):
        led.advance(LIMITS.step_s - 1)
        led.receive(0, Paused(1, 1, MS))
    assert led.lost == []
    led.advance(LIMITS.step_s + LIMITS.heartbeat_s)
    assert "rank 0 has not answered step 1" in led.lost[0]


async def test_leader_gives_up_a_batch_without_end(led: LeaderHarness) -> None:
    """Each time slice is short; together they take longer than the step deadline."""
    led.leader.decide(batch(1, 200))
    for _ in range(int(LIMITS.step_s)):
        led.receive(0, Paused(1, 1, 1000 * MS))
    assert led.lost == []
    led.receive(0, Paused(1, 1, 1000 * MS))
    assert led.lost == ["encode: rank 0 has worked on step 1 for 31 s, limit 30 (deadlines.step_s)"]


async def test_leader_runs_no_hook_within_a_batch(led: LeaderHarness) -> None:
    """A hook runs between two steps, never within one; heartbeats continue."""
    led.leader.decide(batch(1, 200))
    led.advance(20)
    led.receive(0, Paused(1, 1, MS))
    assert not [one for one in led.entries() if isinstance(one, RunHook)]
    assert [one for one in led.entries() if isinstance(one, Heartbeat)]
    led.receive(0, EncodeResult(1, None, 0))
    led.receive(1, StepCheck(1, b""))
    led.advance(5)
    hooks = [index for index, one in enumerate(led.entries(), 1) if isinstance(one, RunHook)]
    assert len(hooks) == 1
    led.beat(hooks[0])
    assert led.lost == []


async def test_leader_changes_no_adapter_within_a_batch(led: LeaderHarness) -> None:
    """Ranks would answer before the batch is done, which may use the adapter."""
    led.leader.decide(batch(1, 200))
    changes = [led.leader.change_adapters(one) for one in (AddAdapter(1, "a"), RemoveAdapter(1))]
    led.receive(0, Paused(1, 1, MS))
    assert led.entries()[-1] == Continue(1, 100)
    led.receive(0, EncodeResult(1, None, 0))
    led.receive(1, StepCheck(1, b""))
    assert led.entries()[-2:] == [AddAdapter(1, "a"), RemoveAdapter(1)]
    for seq in (len(led.entries()) - 1, len(led.entries())):
        for rank in (0, 1):
            led.receive(rank, AdapterChanged(seq))
    assert led.lost == []
    assert [one.result() for one in changes] == [["", ""]] * 2


async def test_leader_lost_within_a_batch_changes_no_adapter(led: LeaderHarness) -> None:
    led.leader.decide(batch(1, 200))
    change = led.leader.change_adapters(AddAdapter(1, "a"))
    led.receive(1, Paused(1, 1, MS))
    assert led.lost
    assert change.cancelled()


async def test_leader_puts_due_hooks_before_a_step() -> None:
    """Every rank runs a hook between the same two steps, an interval after the end of its last run."""
    led = LeaderHarness(2).enter(hooks={"balance": 10.0, "tidy": 25.0})
    ran: list[tuple[str, int]] = []
    for step in range(1, 41):
        known = len(led.entries())
        led.decide(step)
        for seq, entry in enumerate(led.entries()[known:], known + 1):
            if isinstance(entry, RunHook):
                ran.append((entry.name, step))
                led.advance(3 if step == 21 else 0)
                led.beat(seq)
        led.answer(step)
        led.advance(1)
    assert [step for name, step in ran if name == "balance"] == [11, 21, 31]
    assert [step for name, step in ran if name == "tidy"] == [23]
    assert led.link.sent[0] == led.link.sent[1]
    assert led.lost == []


async def test_leader_runs_no_hook_that_runs_or_in_an_idle_group() -> None:
    """After a step a hook is due once; then heartbeats are sent, and nothing else."""
    led = LeaderHarness(2).enter(hooks={"balance": 1.0})
    for steps in range(3):
        before = led.entries().count(RunHook("balance"))
        for second in range(60):
            led.loop.advance(1)
            led.beat(len(led.entries()))
            if second == 10 and steps:
                led.decide(steps)
                led.answer(steps)
        assert led.entries().count(RunHook("balance")) == before + bool(steps)
    assert {*map(type, led.entries())} == {Heartbeat, RunHook, GenerateDecision}
    assert led.lost == []


def led_with_a_hook() -> tuple[LeaderHarness, int]:
    """Return a leader whose ranks run a hook after a step, and the number of its entry."""
    led = LeaderHarness(2).enter(hooks={"balance": 1.0})
    led.decide(1)
    led.answer(1)
    led.advance(LIMITS.heartbeat_s + 1)
    return led, led.entries().index(RunHook("balance")) + 1


async def test_leader_deadline_of_a_hook() -> None:
    """A hook that does not end is subject to the step deadline.

    A reply to a heartbeat that was sent before the hook may arrive after it.
    """
    led, seq = led_with_a_hook()
    led.beat(seq - 1)
    led.advance(LIMITS.step_s + 2 * LIMITS.heartbeat_s)
    assert "limit 30 (deadlines.step_s)" in led.lost[0]


async def test_leader_result_is_no_answer_to_the_hook_at_a_place_of_the_same_number() -> None:
    led, seq = led_with_a_hook()
    led.receive(0, said(0, seq))
    assert led.lost == ["generate: rank 0 sent a result, but no step is due"]


async def test_leader_runs_a_due_hook_before_a_step_and_not_after_a_result() -> None:
    """A result may trigger the next step at once; a hook that is due runs right before that step."""
    led = LeaderHarness(2).enter(hooks={"balance": LIMITS.heartbeat_s / 4})
    led.decide(1)
    led.loop.advance(LIMITS.heartbeat_s / 2)
    led.answer(1, 0)
    assert led.entries() == [GenerateDecision(1)]
    led.decide(2)
    assert led.entries() == [GenerateDecision(1), RunHook("balance"), GenerateDecision(2)]
