"""The leader of a group: authentication of ranks, heartbeats, and when the group is given up."""

from __future__ import annotations

import zlib

import msgspec
import pytest

from tests.unit.aio.leader.leader_harness import LIMITS, LeaderHarness, said
from vsched.aio.leader import BEAT_FRACTION
from vsched.failures import ErrorKind
from vsched.kernel.decisions import GenerateDecision
from vsched.transport.zmq_link import rank_identity
from vsched.wire import (
    Beat,
    Heartbeat,
    Hello,
    Loading,
    RankFailed,
    RankReport,
    Ready,
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
async def test_leader_ignores_unauthenticated_peers(
    hello: Hello | None, caplog: pytest.LogCaptureFixture
) -> None:
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


async def test_leader_ignores_identities_that_are_no_rank_and_garbage_of_strangers(
    caplog: pytest.LogCaptureFixture,
) -> None:
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
