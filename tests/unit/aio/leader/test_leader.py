"""The leader of a group: authentication of ranks, heartbeats, and when the group is given up."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from tests.unit.aio.leader.leader_harness import LIMITS, LeaderHarness
from vsched.aio.leader import EARLY
from vsched.failures import ErrorKind
from vsched.kernel.decisions import GenerateDecision
from vsched.transport.zmq_link import rank_identity
from vsched.wire import (
    Beat,
    GenerateResult,
    Heartbeat,
    Hello,
    Loading,
    RankFailed,
    Ready,
    Stop,
    encode_report,
)


@pytest.fixture
async def led(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LeaderHarness]:
    led = LeaderHarness(monkeypatch, ranks=1)
    yield led
    led.leader.close()


@pytest.fixture
async def led_two(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LeaderHarness]:
    led = LeaderHarness(monkeypatch, ranks=2)
    yield led
    led.leader.close()


RESULT = GenerateResult(1, b"", b"", [], [], 0)


async def test_leader_is_ready_when_every_rank_is(led_two: LeaderHarness) -> None:
    """In rank order, whatever the order of readiness."""
    led = led_two
    led.enter(1)
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
    led: LeaderHarness, hello: Hello | None
) -> None:
    """Messages with a wrong secret, none, or another rank's are ignored without an error."""
    if hello is not None:
        led.receive(0, hello)
    led.receive(0, Ready(99, {}))
    led.receive(0, RankFailed(ErrorKind.DESYNC, "RankDesync", "ha"))
    led.receive(0, RESULT)
    assert not led.leader.ready.done()
    assert (led.lost, led.results) == ([], [])
    led.enter(0)
    assert led.leader.ready.result() == [Ready(10, {"kv": 0})]


async def test_leader_logs_what_it_drops_of_a_rank_that_did_not_prove_itself(
    led: LeaderHarness, caplog: pytest.LogCaptureFixture
) -> None:
    """Peers that are no rank at all are not logged: they could fill the log."""
    led.link.on_frame(b"rank-9", encode_report(RESULT))
    assert caplog.messages == []
    led.receive(0, RESULT)
    assert caplog.messages == ["generate: dropped a report of a peer that did not prove itself"]


async def test_leader_ignores_identities_that_are_no_rank_and_garbage_of_strangers(
    led: LeaderHarness,
) -> None:
    """Even if they have the secret."""
    led.link.on_frame(rank_identity(0), b"garbage")
    for identity in (b"rank-1", b"rank--1", b"", b"\x00abc"):
        led.link.on_frame(identity, encode_report(Hello(0, "sesame")))
        led.link.on_frame(identity, encode_report(Ready(1, {})))
    assert not led.leader.ready.done()
    led.enter(0)
    assert led.lost == []


async def test_leader_sends_every_decision_to_every_rank(led_two: LeaderHarness) -> None:
    """One numbered log, the same frames for all."""
    led = led_two
    led.enter(0, 1)
    decisions = [GenerateDecision(step) for step in (1, 2, 3)]
    for decision in decisions:
        led.leader.decide(decision)
    led.leader.stop()
    assert led.entries(0) == [*decisions, Stop()]
    assert led.link.sent[0] == led.link.sent[1]


async def test_leader_idle_sends_heartbeats(led: LeaderHarness) -> None:
    """An idle leader sends an empty, numbered decision each interval; ranks that reply stay for hours."""
    led.enter(0)
    for _ in range(200):
        led.loop.advance(LIMITS.heartbeat_s)
        led.receive(0, Beat(len(led.link.sent[0]), {}))
    assert led.lost == []
    assert set(map(type, led.entries())) == {Heartbeat}
    assert 200 <= len(led.entries()) <= 200 / EARLY + 1


@pytest.mark.parametrize("last_s", [0.0, 0.5, 1.9, 2.1, 3.9])
async def test_leader_gap_is_at_most_one_interval(led: LeaderHarness, last_s: float) -> None:
    """One deadline for the heartbeat, wherever in the interval the last decision fell."""
    led.enter(0)
    led.loop.advance(last_s)
    led.leader.decide(GenerateDecision(1))
    led.receive(0, RESULT)
    sent_s = led.loop.now_s
    while len(led.entries()) == 1:
        led.loop.advance(0.1)
    assert led.loop.now_s - sent_s <= LIMITS.heartbeat_s


async def test_leader_gives_up_a_silent_rank(led_two: LeaderHarness) -> None:
    """The error names the silent rank only."""
    led = led_two
    led.enter(0, 1)
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
    led.receive(0, RESULT)
    assert len(led.lost) == 1
    assert led.results == []


@pytest.mark.parametrize("at_work", [False, True])
async def test_leader_keeps_ranks_after_a_stop_of_the_whole_machine(
    led: LeaderHarness, *, at_work: bool
) -> None:
    """The engine wakes up first: silence of ranks during the stop does not count, only silence after it."""
    led.enter(0)
    if at_work:
        led.leader.decide(GenerateDecision(1))
    led.advance(2.0)
    led.loop.now_s += 3600.0
    led.loop.advance(LIMITS.heartbeat_s)
    led.pulse(0)
    led.loop.advance(LIMITS.heartbeat_s)
    assert led.lost == []
    led.loop.advance(LIMITS.rank_timeout_s + 3 * LIMITS.heartbeat_s)
    assert ("has not answered step 1" if at_work else "was silent") in led.lost[0]


async def test_leader_rank_that_was_ready_long_before_the_others_is_not_silent(
    led_two: LeaderHarness,
) -> None:
    """Loading times differ; a rank that is ready early owes no reply until all are ready."""
    led = led_two
    led.enter(0)
    led.loop.advance(10 * LIMITS.rank_timeout_s)
    led.enter(1)
    led.loop.advance(LIMITS.heartbeat_s)
    assert led.lost == []
    assert led.entries(0) == [Heartbeat()]


async def test_leader_gives_up_a_step_that_takes_too_long(led: LeaderHarness) -> None:
    """The message names the setting of the deadline."""
    led.enter(0)
    led.leader.decide(GenerateDecision(1))
    led.advance(LIMITS.step_s - 1)
    assert led.lost == []
    led.leader.decide(GenerateDecision(2))
    led.advance(1 + LIMITS.heartbeat_s)
    assert led.lost[0].startswith("generate: rank 0 has not answered step 1 for 3")
    assert led.lost[0].endswith("limit 30 (deadlines.step_s)")


async def test_leader_deadline_of_a_step_begins_when_the_one_before_is_done(
    led: LeaderHarness,
) -> None:
    """A decision is sent one step ahead; the time of the previous step does not count."""
    led.enter(0)
    led.leader.decide(GenerateDecision(1))
    led.leader.decide(GenerateDecision(2))
    led.advance(LIMITS.step_s - 1)
    led.receive(0, RESULT)
    led.advance(LIMITS.step_s - 1)
    assert led.lost == []
    led.advance(1 + LIMITS.heartbeat_s)
    assert len(led.lost) == 1


@pytest.mark.parametrize("frame", [b"", b"garbage", msgspec.msgpack.encode([1, 2])])
async def test_leader_gives_up_a_rank_that_talks_garbage(led: LeaderHarness, frame: bytes) -> None:
    """Frames are typed, and the failure is reported once."""
    led.enter(0)
    led.link.on_frame(rank_identity(0), frame)
    led.link.on_frame(rank_identity(0), frame)
    assert led.lost == ["generate: rank 0 sent a frame that is no report"]


@pytest.mark.parametrize("lost_by", ["report", "silence"])
async def test_leader_sends_nothing_to_a_group_that_is_lost(
    led_two: LeaderHarness, lost_by: str
) -> None:
    """Its ranks are being killed, and heartbeats would keep ranks alive that have to end by themselves."""
    led = led_two
    led.enter(0, 1)
    if lost_by == "report":
        led.receive(1, RankFailed(ErrorKind.DESYNC, "RankDesync", "another digest"))
        sent = len(led.entries(0))
    else:
        while not led.lost:
            sent = len(led.entries(0))
            led.loop.advance(1)
    led.loop.advance(10 * LIMITS.heartbeat_s)
    assert len(led.entries(0)) == sent


@pytest.mark.parametrize(("gone", "sent_to_others"), [(0, 0), (1, 1)])
async def test_leader_gives_up_a_rank_that_takes_no_step(
    led_two: LeaderHarness, gone: int, sent_to_others: int
) -> None:
    """Its full queue blocks nothing; ranks after it get no step: they would wait in a collective for it."""
    led = led_two
    led.enter(0, 1)
    led.link.backlogged.add(gone)
    led.leader.decide(GenerateDecision(1))
    assert led.lost == [f"generate: rank {gone} is gone or does not read its decisions"]
    assert len(led.entries(1 - gone)) == sent_to_others


async def test_leader_answer_to_a_heartbeat_is_none_to_the_step_of_the_same_number(
    led: LeaderHarness,
) -> None:
    """Steps and log entries are numbered separately."""
    led.enter(0)
    led.loop.advance(LIMITS.heartbeat_s)
    assert led.entries() == [Heartbeat()]
    led.leader.decide(GenerateDecision(1))
    led.receive(0, Beat(1, {}))
    led.receive(0, RESULT)
    assert (led.lost, led.results) == ([], [RESULT])


async def test_leader_gives_the_last_word_of_a_rank_that_is_gone(led_two: LeaderHarness) -> None:
    """It reported the reason, and was gone before the report was read."""
    led = led_two
    led.enter(0, 1)
    led.link.backlogged.add(1)
    led.link.unread.append((1, RankFailed(ErrorKind.DESYNC, "RankDesync", "another digest")))
    led.leader.decide(GenerateDecision(1))
    assert led.lost == ["generate: rank 1 stopped with RankDesync: another digest"]


@pytest.mark.parametrize(
    ("speaks", "reason"),
    [
        (True, "rank 1 stopped with DeviceOutOfMemory: no room"),
        (False, "rank 0 stopped with PeerLost: the connection is gone"),
    ],
)
async def test_leader_waits_for_the_word_of_the_rank_that_is_missed(
    led_two: LeaderHarness, speaks: bool, reason: str
) -> None:
    """Rank 0 loses its connection to rank 1, which gives the reason a moment later; if not, rank 0's counts."""
    led = led_two
    led.enter(0, 1)
    led.receive(0, RankFailed(ErrorKind.PEER_LOST, "PeerLost", "the connection is gone"))
    assert not led.lost
    if speaks:
        led.receive(1, RankFailed(ErrorKind.OUT_OF_MEMORY, "DeviceOutOfMemory", "no room"))
    led.loop.advance(1)
    assert led.lost == [f"generate: {reason}"]


async def test_leader_that_is_closed_says_nothing_more(led: LeaderHarness) -> None:
    led.enter(0)
    led.leader.close()
    led.receive(0, RankFailed(ErrorKind.DESYNC, "RankDesync", "late"))
    led.loop.advance(100)
    led.leader.stop()
    assert (led.lost, led.entries()) == ([], [])
    assert led.link.closed
