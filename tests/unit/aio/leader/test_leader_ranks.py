"""A leader of several ranks: if one diverges, falls behind or dies, the group is given up with its name."""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest

from tests.unit.aio.leader.leader_harness import LIMITS, LeaderHarness, said
from tests.unit.memory.views import rank_memory
from vsched.aio.leader import THREADS_LAST_S, ProcessLiveness, RankThreads
from vsched.failures import EncodeErrorKind, ErrorKind
from vsched.kernel.decisions import EncodeDecision
from vsched.memory import Sized
from vsched.transport.zmq_link import QUEUE_MAX, pulse_identity
from vsched.wire import (
    Beat,
    EncodeResult,
    Hello,
    Pulse,
    RankFailed,
    RankReport,
    Ready,
    SizeKv,
    StepCheck,
    ThreadsInUse,
    check_of,
    encode_report,
)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
async def test_leader_ranks_must_compute_the_same(order: tuple[int, ...]) -> None:
    """In any order of reports; the first rank's result is taken when it arrives, and nothing is kept.

    The error names rank and step, however late; a result that is known to differ is not passed on.
    """
    led = LeaderHarness(3).enter()
    for step in range(1, 6):
        led.decide(step)
        for rank in order:
            led.answer(step, rank)
            assert len(led.results) == step - (0 not in order[: order.index(rank) + 1])
    assert (led.lost, [one.step for one in led.results]) == ([], [1, 2, 3, 4, 5])
    assert not any(led.leader._detector._pending), "nothing is kept"
    led.decide(6)
    for rank in order:
        led.receive(rank, said(rank, 6, b"\2\0\0\0" if rank == 2 else b"\1\0\0\0"))
    assert led.lost == ["generate: rank 2 has another result of step 6 than rank 0 (RankDesync)"]
    assert len(led.results) == 5 + (order.index(0) < order.index(2))


async def test_leader_encode_ranks_are_compared_by_outcome() -> None:
    """A batch fails on all ranks or on none; the reasons they know may differ."""
    led = LeaderHarness(2, name="encode-1").enter()
    led.leader.decide(EncodeDecision(1, []))
    led.receive(0, EncodeResult(1, EncodeErrorKind.OUT_OF_MEMORY, 0))
    led.receive(1, StepCheck(1, check_of(EncodeResult(1, EncodeErrorKind.FAILED, 0))))
    assert led.lost == []
    led.leader.decide(EncodeDecision(2, []))
    led.receive(1, StepCheck(2, check_of(EncodeResult(2, EncodeErrorKind.FAILED, 0))))
    led.receive(0, EncodeResult(2, None, 0))
    assert led.lost == ["encode-1: rank 1 has another result of step 2 than rank 0 (RankDesync)"]


NO_STEP = "sent a result, but no step is due"
HA = RankFailed(ErrorKind.DESYNC, "RankDesync", "ha")


@pytest.mark.parametrize(
    ("decided", "rank", "report", "reason"),
    [
        (0, 0, said(0, 1), NO_STEP),
        (1, 1, said(0, 1), NO_STEP),
        (1, 0, StepCheck(1, b""), NO_STEP),
        (1, 0, EncodeResult(1, None, 0), NO_STEP),
        (2, 0, said(0, 2), "sent the result of step 2, but step 1 is due"),
        (1, 2, StepCheck(2, b""), "sent the result of step 2, but step 1 is due"),
        (1, 1, HA, "stopped with RankDesync: ha"),
    ],
)
async def test_leader_gives_up_a_rank_that_is_out_of_order(
    decided: int, rank: int, report: RankReport, reason: str
) -> None:
    """Each rank reports every step once, in order, with the report of its role; nothing else is passed on."""
    led = LeaderHarness(3).enter()
    led.decide(*range(1, decided + 1))
    led.receive(rank, report)
    assert (led.lost, led.results) == ([f"generate: rank {rank} {reason}"], [])


async def test_leader_rank_that_stops_reporting_is_given_up() -> None:
    """The first rank continues at full speed; the step deadline applies to every rank."""
    led = LeaderHarness(3).enter()
    step = 0
    while not led.lost:
        step += 1
        led.decide(step)
        led.answer(step, *((0, 1, 2) if step == 1 else (0, 1)))
        led.advance(1)
        assert step < 100
    assert led.lost[0].startswith("generate: rank 2 has not answered step 2 for 3")
    assert step <= LIMITS.step_s + LIMITS.heartbeat_s + 2


async def test_leader_rank_that_is_too_far_behind_is_deaf() -> None:
    """The number of steps kept for a slow rank is bounded, whatever the deadline."""
    led = LeaderHarness(3).enter()
    for step in range(1, QUEUE_MAX + 1):
        led.decide(step)
        led.answer(step, 0, 1)
    assert led.lost == []
    led.decide(QUEUE_MAX + 1)
    assert led.lost == ["generate: rank 2 is more steps behind than its queue is long"]


async def test_leader_pulse_does_not_stand_for_an_answer() -> None:
    """A process that runs but no longer follows its log is silent."""
    led = LeaderHarness(3).enter()
    waited_s = 0
    while not led.lost:
        led.advance(1)
        waited_s += 1
        for rank in (0, 2):
            led.receive(rank, Beat(len(led.entries(rank)), {}))
        assert waited_s < 100
    assert led.lost[0].startswith("generate: rank 1 was silent for ")
    assert waited_s > LIMITS.rank_timeout_s


async def test_leader_hears_nothing_but_life_from_a_pulse() -> None:
    """A pulse only proves that a process runs; reports must come from the log follower."""
    led = LeaderHarness(3).enter()
    led.decide(1)
    led.pulse(0, 1, 2)
    for report in (said(0, 1), HA, Beat(1, {"kv": 99})):
        led.link.on_frame(pulse_identity(0), encode_report(report))
    assert (led.results, led.lost) == ([], [])
    assert led.leader.memory[0] == {"kv": 0}


async def test_leader_rank_that_is_stopped_in_a_step_is_found_by_its_pulse() -> None:
    """Long before the step deadline; a stranger without the secret cannot make it look alive, nor report for it."""
    led = LeaderHarness(3).enter()
    led.decide(1)
    until_s = led.loop.now_s + LIMITS.rank_timeout_s + 2 * LIMITS.heartbeat_s
    while led.loop.now_s < until_s:
        led.pulse(0, 2)
        for report in (Hello(1, "wrong"), Pulse(), HA):
            led.link.on_frame(pulse_identity(1), encode_report(report))
        led.loop.advance(1)
    assert led.lost[0].startswith("generate: rank 1 was silent")


async def test_leader_knows_the_threads_of_each_rank(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever else is due: a report of threads counts as no reply. A change is logged."""
    led = LeaderHarness(3).enter()
    led.decide(1)
    led.receive(0, Ready(10, {}, threads=ThreadsInUse(2, 2)))
    led.receive(1, ThreadsInUse(1, 2))
    assert led.leader.threads == {0: ThreadsInUse(2, 2), 1: ThreadsInUse(1, 2)}
    led.answer(1, 0)
    assert ([one.step for one in led.results], led.lost) == ([1], [])
    led.advance(THREADS_LAST_S + LIMITS.heartbeat_s)
    assert "generate rank 1 computes with 1 of 2 threads" in caplog.text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([(0, 1)], [(5, "1 of 4")]),
        ([(10, 1), (14, 4), (16, 1), (20, 4)], []),  # not long enough
        ([(10, 3), (13, 1)], [(18, "1 of 4")]),  # another number
        ([(10, 1), (13, 1)], [(15, "1 of 4")]),  # the same
        ([(10, 1), (30, 3), (40, 4)], [(15, "1 of 4"), (35, "3 of 4"), (45, "all of its 4")]),
        ([(10, 1), (20, 4), (22, 1), (30, 4)], [(15, "1 of 4"), (35, "all of its 4")]),
    ],
)
def test_change_of_threads_is_logged_if_it_lasts(
    changes: list[tuple[int, int]],
    expected: list[tuple[int, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    threads = RankThreads("generate")
    lines: list[tuple[int, str]] = []
    for second in range(60):
        for _, active in [change for change in changes if change[0] == second]:
            threads.take(0, ThreadsInUse(active, 4), second)
        threads.log_changes(second)
        lines.extend((second, line) for line in caplog.messages)
        caplog.clear()
    assert [second for second, _ in lines] == [second for second, _ in expected]
    for (_, line), (_, words) in zip(lines, expected, strict=True):
        assert f"generate rank 0 computes with {words}" in line


def test_change_of_threads_in_two_groups_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    threads = RankThreads("encode and generate")
    for now_s in (0.0, 1.0):  # the ranks of both groups are one process
        threads.take(0, ThreadsInUse(1, 2), now_s)
    for now_s in (THREADS_LAST_S, THREADS_LAST_S + 1.0):
        threads.log_changes(now_s)
    assert [line.split(" computes ")[0] for line in caplog.messages] == [
        "encode and generate rank 0"
    ]


@pytest.mark.parametrize(
    "other", [Ready(11, {}), Ready(10, {}, {"balance": 1.0}), Ready(10, {}, {"tidy": 2.0})]
)
async def test_leader_ranks_must_be_ready_for_the_same(other: Ready) -> None:
    """The same KV cache and the same periodic work, or the group does not start."""
    led = LeaderHarness(2)
    for rank, ready in ((0, Ready(10, {}, {"balance": 2.0})), (1, other)):
        led.receive(rank, Hello(rank, "sesame"))
        led.receive(rank, ready)
    assert not led.leader.ready.done()
    assert led.lost[0].startswith("generate: rank 1 is ready with 1")
    assert led.lost[0].endswith("(RankDesync)")


async def test_leader_asks_ranks_that_voted_differently_to_meet_again() -> None:
    """All ranks retry together: if only some ran out of memory, the next order has all of them start over."""
    led = LeaderHarness(2).enter()
    order = SizeKv(64, profile=True, headroom_bytes=0)
    for votes in (("fits", "out_of_memory"), ("out_of_memory",) * 2, ("fits", "fits")):
        sizing = asyncio.ensure_future(led.leader.size(order))
        await asyncio.sleep(0)
        for rank, outcome in enumerate(votes):
            led.receive(rank, Sized(outcome, "", rank_memory()))  # type: ignore[arg-type]
        assert [vote.outcome for vote in await sizing] == list(votes)
    orders = [entry for entry in led.entries() if isinstance(entry, SizeKv)]
    assert [one.reset_peers for one in orders] == [False, True, False]


async def test_leaders_of_the_same_processes_share_one_order() -> None:
    """Steps of both logs have one order, and a step of one group is no silence in the other."""
    liveness = ProcessLiveness()
    encode = LeaderHarness(2, name="encode", liveness=liveness).enter()
    generate = LeaderHarness(2, liveness=liveness, loop=encode.loop).enter()
    encode.leader.decide(EncodeDecision(1, []))
    generate.decide(1)
    encode.leader.decide(EncodeDecision(2, []))
    for step in (1, 2):
        encode.receive(0, EncodeResult(step, None, 0))
        encode.receive(1, StepCheck(step, b""))
    encode.advance(LIMITS.step_s - 1)
    assert (encode.lost, generate.lost) == ([], [])
    assert next(liveness.turns) == 4
    encode.advance(LIMITS.heartbeat_s + 2)
    assert encode.lost == []
    assert "has not answered step 1" in generate.lost[0]
