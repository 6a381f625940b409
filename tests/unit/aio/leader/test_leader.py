"""The leader of a group: authentication, heartbeats; a rank that diverges, falls behind or dies is given up by name."""

from __future__ import annotations

import asyncio
import itertools
import logging
import zlib

import msgspec
import pytest

from tests.unit.aio.leader.leader_harness import LIMITS, LeaderHarness, said
from tests.unit.memory.views import rank_memory
from vsched.aio.leader import BEAT_FRACTION, THREADS_LAST_S, ProcessLiveness, RankThreads
from vsched.failures import EncodeErrorKind, ErrorKind
from vsched.kernel.decisions import EncodeDecision, GenerateDecision
from vsched.memory import Sized
from vsched.transport.zmq_link import QUEUE_MAX, pulse_identity, rank_identity
from vsched.wire import (
    Beat,
    EncodeResult,
    Heartbeat,
    Hello,
    Loading,
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

DESYNC = RankFailed(ErrorKind.DESYNC, "RankDesync", "another digest")


def no_text(report: RankReport) -> bytes:
    """A frame with text that is not UTF-8, in a report with the text `ab`."""
    body = encode_report(report)[4:]
    assert body.count(b"ab") == 1
    body = body.replace(b"ab", b"\xff\xfe")
    return zlib.crc32(body).to_bytes(4, "little") + body


GARBAGE = [
    b"",
    b"garbage",
    msgspec.msgpack.encode([1, 2]),
    no_text(RankFailed(ErrorKind.INTERNAL, "why", "ab")),
    no_text(Hello(0, "ab")),
]


async def test_leader_is_ready_when_every_rank_is() -> None:
    """In rank order, whatever the order of readiness."""
    led = LeaderHarness(2).enter(1)
    assert not led.leader.ready.done()
    led.receive(0, Hello(0, "sesame"))
    led.receive(0, Loading("weights", 0.5))
    assert not led.leader.ready.done()
    led.receive(0, Ready(10, {"kv": 0}))
    assert led.leader.ready.result() == [Ready(10, {"kv": 0}), Ready(10, {"kv": 1})]
    assert led.progress == [("weights", 0.5)]
    assert led.leader.memory == {0: {"kv": 0}, 1: {"kv": 1}}


@pytest.mark.parametrize(
    "hello", [Hello(0, "wrong"), Hello(0, ""), Hello(1, "sesame"), Hello(0, "sésame"), None]
)
async def test_strangers_are_dropped(hello: Hello | None, caplog: pytest.LogCaptureFixture) -> None:
    """Messages with a wrong secret, none, or another rank's are dropped without an error, and logged."""
    led = LeaderHarness()
    reports: list[RankReport] = [Ready(99, {}), DESYNC, said(0, 1)]
    for report in reports if hello is None else [hello, *reports]:
        led.receive(0, report)
    assert not led.leader.ready.done()
    assert (led.lost, led.results) == ([], [])
    dropped = "generate: dropped a report of an unauthenticated peer"
    assert set(caplog.messages) == {dropped}
    led.enter()
    assert led.leader.ready.result() == [Ready(10, {"kv": 0})]


async def test_leader_ignores_odd_identities_and_garbage(caplog: pytest.LogCaptureFixture) -> None:
    """Even if they have the secret; nothing is logged: they could fill the log."""
    led = LeaderHarness()
    for frame in GARBAGE:
        led.link.on_frame(rank_identity(0), frame)
    for identity in (b"rank-1", b"rank--1", b"", b"\x00abc"):
        led.link.on_frame(identity, encode_report(Hello(0, "sesame")))
        led.link.on_frame(identity, encode_report(Ready(1, {})))
    assert not led.leader.ready.done()
    led.enter()
    assert (led.lost, caplog.messages) == ([], [])


async def test_leader_idle_sends_heartbeats() -> None:
    """An idle leader sends an empty, numbered decision each interval; ranks that reply stay for hours."""
    led = LeaderHarness().enter()
    for _ in range(200):
        led.loop.advance(LIMITS.heartbeat_s)
        led.beat(len(led.link.sent[0]))
    assert led.lost == []
    assert set(map(type, led.entries())) == {Heartbeat}
    assert 200 <= len(led.entries()) <= 200 / BEAT_FRACTION + 1


@pytest.mark.parametrize("last_s", [0.0, 0.5, 1.9, 2.1, 3.9])
async def test_leader_gap_is_at_most_one_interval(last_s: float) -> None:
    """One deadline for the heartbeat, wherever in the interval the last decision fell."""
    led = LeaderHarness().enter()
    led.loop.advance(last_s)
    led.decide(1)
    led.answer(1)
    sent_s = led.loop.now_s
    while len(led.entries()) == 1:
        led.loop.advance(0.1)
    assert led.loop.now_s - sent_s <= LIMITS.heartbeat_s


async def test_leader_gives_up_a_silent_rank() -> None:
    """The error names the silent rank only."""
    led = LeaderHarness(2).enter()
    led.decide(1)
    waited_s = 0.0
    while not led.lost:
        led.loop.advance(1)
        waited_s += 1
        led.receive(0, Beat(1, {}))
        assert waited_s < 60
    (reason,) = led.lost
    assert reason.startswith("generate: rank 1 was silent for 2")
    assert LIMITS.rank_timeout_s < waited_s <= LIMITS.rank_timeout_s + 3 * LIMITS.heartbeat_s
    led.loop.advance(100)
    led.answer(1, 0)
    assert (led.lost, led.results) == ([reason], [])


@pytest.mark.parametrize("at_work", [False, True])
async def test_leader_keeps_ranks_after_a_stop_of_the_whole_machine(*, at_work: bool) -> None:
    """The engine wakes up first: silence of ranks during the stop does not count, only silence after it."""
    led = LeaderHarness().enter()
    if at_work:
        led.decide(1)
    led.advance(2.0)
    led.loop.now_s += 3600.0
    led.loop.advance(LIMITS.heartbeat_s)
    led.pulse(0)
    led.loop.advance(LIMITS.heartbeat_s)
    assert led.lost == []
    led.loop.advance(LIMITS.rank_timeout_s + 3 * LIMITS.heartbeat_s)
    assert ("has not answered step 1" if at_work else "was silent") in led.lost[0]


async def test_leader_rank_that_was_ready_long_before_the_others_is_not_silent() -> None:
    """Loading times differ; a rank that is ready early owes no reply until all are ready."""
    led = LeaderHarness(2).enter(0)
    led.loop.advance(10 * LIMITS.rank_timeout_s)
    led.enter(1)
    led.loop.advance(LIMITS.heartbeat_s)
    assert led.lost == []
    assert led.entries() == [Heartbeat()]


async def test_leader_gives_up_a_step_that_takes_too_long() -> None:
    """The message names the setting. A decision is sent one step ahead; the time of the step before does not count."""
    led = LeaderHarness().enter()
    led.decide(1, 2)
    led.advance(LIMITS.step_s - 1)
    led.answer(1)
    led.advance(LIMITS.step_s - 1)
    assert led.lost == []
    led.advance(1 + LIMITS.heartbeat_s)
    (reason,) = led.lost
    assert reason.startswith("generate: rank 0 has not answered step 2 for 3")
    assert reason.endswith("limit 30 (deadlines.step_s)")


@pytest.mark.parametrize("frame", GARBAGE)
async def test_leader_gives_up_a_rank_that_talks_garbage(frame: bytes) -> None:
    """Frames are typed, and the failure is reported once."""
    led = LeaderHarness().enter()
    led.link.on_frame(rank_identity(0), frame)
    led.link.on_frame(rank_identity(0), frame)
    assert led.lost == ["generate: rank 0 sent a frame that is no report"]


@pytest.mark.parametrize("lost_by", ["report", "silence"])
async def test_leader_sends_nothing_to_a_group_that_is_lost(lost_by: str) -> None:
    """Its ranks are being killed, and heartbeats would keep ranks alive that have to end by themselves."""
    led = LeaderHarness(2).enter()
    if lost_by == "report":
        led.receive(1, DESYNC)
    while not led.lost:
        led.loop.advance(1)
    sent = len(led.entries())
    led.loop.advance(10 * LIMITS.heartbeat_s)
    assert len(led.entries()) == sent


@pytest.mark.parametrize(("gone", "sent_to_others"), [(0, 0), (1, 1)])
async def test_leader_gives_up_a_rank_that_takes_no_step(gone: int, sent_to_others: int) -> None:
    """Its full queue blocks nothing; ranks after it get no step: they would wait in a collective for it."""
    led = LeaderHarness(2).enter()
    led.link.backlogged.add(gone)
    led.decide(1)
    assert led.lost == [f"generate: rank {gone} is gone or does not read its decisions"]
    assert len(led.entries(1 - gone)) == sent_to_others


async def test_leader_answer_to_a_heartbeat_is_none_to_the_step_of_the_same_number() -> None:
    """Steps and log entries are numbered separately."""
    led = LeaderHarness().enter()
    led.loop.advance(LIMITS.heartbeat_s)
    led.decide(1)
    assert led.entries() == [Heartbeat(), GenerateDecision(1)]
    led.beat(1)
    led.answer(1)
    assert (led.lost, led.results) == ([], [said(0, 1)])


async def test_leader_gives_the_last_word_of_a_rank_that_is_gone() -> None:
    """It reported the reason, and was gone before the report was read."""
    led = LeaderHarness(2).enter()
    led.link.backlogged.add(1)
    led.link.unread.append((1, DESYNC))
    led.decide(1)
    assert led.lost == ["generate: rank 1 stopped with RankDesync: another digest"]


@pytest.mark.parametrize(
    ("speaks", "reason"),
    [
        (True, "rank 1 stopped with RankDesync: another digest"),
        (False, "rank 0 stopped with PeerLost: the connection is gone"),
    ],
)
async def test_leader_waits_for_the_word_of_a_missed_rank(speaks: bool, reason: str) -> None:
    """Rank 0 loses its connection to rank 1, which gives the reason a moment later; if not, rank 0's counts."""
    led = LeaderHarness(2).enter()
    led.receive(0, RankFailed(ErrorKind.PEER_LOST, "PeerLost", "the connection is gone"))
    assert not led.lost
    if speaks:
        led.receive(1, DESYNC)
    led.loop.advance(1)
    assert led.lost == [f"generate: {reason}"]


async def test_leader_that_is_closed_says_nothing_more() -> None:
    led = LeaderHarness().enter()
    led.leader.close()
    led.receive(0, DESYNC)
    led.loop.advance(100)
    led.leader.stop()
    assert (led.lost, led.entries()) == ([], [])
    assert led.link.closed


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


@pytest.mark.parametrize(
    ("decided", "rank", "report", "reason"),
    [
        (0, 0, said(0, 1), NO_STEP),
        (1, 1, said(0, 1), NO_STEP),
        (1, 0, StepCheck(1, b""), NO_STEP),
        (1, 0, EncodeResult(1, None, 0), NO_STEP),
        (2, 0, said(0, 2), "sent the result of step 2, but step 1 is due"),
        (1, 2, StepCheck(2, b""), "sent the result of step 2, but step 1 is due"),
        (1, 1, DESYNC, "stopped with RankDesync: another digest"),
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
    for report in (said(0, 1), DESYNC, Beat(1, {"kv": 99})):
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
        for report in (Hello(1, "wrong"), Pulse(), DESYNC):
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
            threads.add_report(0, ThreadsInUse(active, 4), second)
        threads.log_changes(second)
        lines.extend((second, line) for line in caplog.messages)
        caplog.clear()
    assert [second for second, _ in lines] == [second for second, _ in expected]
    for (_, line), (_, words) in zip(lines, expected, strict=True):
        assert f"generate rank 0 computes with {words}" in line


def test_change_of_threads_in_two_groups_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    threads = RankThreads("encode and generate")
    for now_s in (0.0, 1.0):  # the ranks of both groups are one process
        threads.add_report(0, ThreadsInUse(1, 2), now_s)
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
