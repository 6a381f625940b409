"""The decision log on the wire: round trips, and a follower that notices every difference."""

from __future__ import annotations

import struct
from collections.abc import Callable
from hashlib import blake2b

import msgspec
import pytest

from vsched.errors import RankDesync
from vsched.kernel.decisions import (
    ChunkItem,
    ChunkPlan,
    EncodeDecision,
    EncodeTask,
    GenerateDecision,
    ItemPlace,
    Join,
    Leave,
    RequestData,
)
from vsched.kernel.events import Finished
from vsched.types import Extent, FinishReason, SamplingParams
from vsched.wire import (
    Beat,
    EncodeResult,
    Entry,
    Failure,
    FollowerLog,
    GenerateResult,
    Heartbeat,
    Hello,
    LeaderLog,
    Loading,
    Ready,
    Report,
    Stop,
    TokenLogprob,
    decode_report,
    encode_report,
)

FULL = GenerateDecision(
    7,
    forgotten=[3],
    left=[Leave(1, 0, keep=True)],
    joined=[
        Join(
            4,
            2,
            16,
            18,
            [5, 6],
            RequestData(
                b"\1\0\0\0",
                1,
                [ItemPlace(0, 4, (1, 2, 2))],
                SamplingParams(temperature=0.5, stop=("x",), logprobs=2),
                (2, 3),
            ),
        ),
        Join(5, 3, 0, 1, [7], None),
    ],
    grown=[1, 9],
    chunks=[ChunkPlan(2, 16, 18, [ChunkItem(14, 4, [8])])],
)
ENTRIES: list[Entry] = [
    GenerateDecision(1),
    FULL,
    EncodeDecision(1, [EncodeTask(b"k" * 32, (1, 2, 4), 2, Extent(64, 128), [0, 1])]),
    Heartbeat(),
    Stop(),
]
REPORTS: list[Report] = [
    Hello(0, "secret"),
    Loading("weights", 0.5),
    Ready(10, {"kv": 1 << 40}),
    GenerateResult(
        3,
        b"\1\2",
        b"\3",
        [Finished(1, 9, FinishReason.STOP)],
        [TokenLogprob(1, -0.5, [(3, -1.0)])],
        8,
    ),
    EncodeResult(4, "the image could not be encoded", 5),
    Beat(12, {}),
    Failure("RankDesync", "why"),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: type(entry).__name__)
def test_wire_entries_round_trip(entry: Entry) -> None:
    """A7: what a rank hears is what was decided, type and all."""
    heard = FollowerLog().accept(LeaderLog().append(entry))
    assert heard == entry
    assert type(heard) is type(entry)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_wire_reports_round_trip(report: Report) -> None:
    heard = decode_report(encode_report(report))
    assert heard == report
    assert type(heard) is type(report)


@pytest.mark.parametrize(
    "frame", [b"", b"\x00", b"\xc1", msgspec.msgpack.encode({"type": "Hello"}), b"\x80" * 9]
)
def test_wire_garbage_is_no_report(frame: bytes) -> None:
    """G2: frames are typed."""
    with pytest.raises(msgspec.DecodeError):
        decode_report(frame)


def test_wire_follower_keeps_up_with_the_leader() -> None:
    """A7: numbers are contiguous, and both ends roll the same digest."""
    leader, follower = LeaderLog(), FollowerLog()
    digests = set()
    for index in range(20):
        assert follower.accept(leader.append(ENTRIES[index % len(ENTRIES)])) is not None
        assert (
            (follower.seq, follower.digest)
            == (leader.seq, leader.digest)
            == (index + 1, leader.digest)
        )
        digests.add(leader.digest)
    assert len(digests) == 20, "a digest covers the order of everything before it"


Log = list[list[bytes]]


def without_second(log: Log) -> Log:
    return [log[0], log[2]]


def second_twice(log: Log) -> Log:
    return [log[0], log[1], log[1]]


def swapped(log: Log) -> Log:
    return [log[0], log[2], log[1]]


def from_the_middle(log: Log) -> Log:
    return log[1:]


def another_body(log: Log) -> Log:
    return [log[0], [log[1][0], log[2][1]]]


def one_bit_of_the_body(log: Log) -> Log:
    body = bytearray(log[1][1])
    body[-1] ^= 1
    return [log[0], [log[1][0], bytes(body)]]


def one_bit_of_the_digest(log: Log) -> Log:
    header = bytearray(log[1][0])
    header[-1] ^= 1
    return [log[0], [bytes(header), log[1][1]]]


def another_history(log: Log) -> Log:
    other = LeaderLog()
    other.append(GenerateDecision(99))
    return [log[0], other.append(GenerateDecision(2))]


def no_frames(log: Log) -> Log:
    return [log[0], []]


def one_frame(log: Log) -> Log:
    return [log[0], log[1][:1]]


def three_frames(log: Log) -> Log:
    return [log[0], [*log[1], b""]]


def short_header(log: Log) -> Log:
    return [log[0], [log[1][0][:-1], log[1][1]]]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without_second, "heard entry 3 of the decision log, expected 2"),
        (second_twice, "heard entry 2 of the decision log, expected 3"),
        (swapped, "heard entry 3 of the decision log, expected 2"),
        (from_the_middle, "heard entry 2 of the decision log, expected 1"),
        (another_body, "entry 2 .* decided differently"),
        (one_bit_of_the_body, "entry 2 .* decided differently"),
        (one_bit_of_the_digest, "entry 2 .* decided differently"),
        (another_history, "entry 2 .* decided differently"),
        (no_frames, "after entry 1: 0 frames"),
        (one_frame, "after entry 1: 1 frames"),
        (three_frames, "after entry 1: 3 frames"),
        (short_header, "after entry 1: 2 frames"),
    ],
)
def test_wire_follower_stops_at_any_difference(spoil: Callable[[Log], Log], message: str) -> None:
    """A7: gap, duplicate, reorder, another digest, another shape: detected, never computed on."""
    leader, follower = LeaderLog(), FollowerLog()
    log = spoil([leader.append(GenerateDecision(step)) for step in (1, 2, 3)])
    heard = []
    with pytest.raises(RankDesync, match=message):
        heard += [follower.accept(frames) for frames in log]
    assert follower.seq < 3


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", msgspec.msgpack.encode(["x", 1]), msgspec.msgpack.encode(["g", "one"])]
)
def test_wire_follower_refuses_a_body_that_is_no_decision(body: bytes) -> None:
    """A7, G2: even with the right number and digest."""
    header = struct.pack("<Q16s", 1, blake2b(bytes(16) + body, digest_size=16).digest())
    follower = FollowerLog()
    with pytest.raises(RankDesync, match="entry 1 of the decision log cannot be read"):
        follower.accept([header, body])
    assert (follower.seq, follower.digest) == (0, bytes(16)), "a refused entry is not counted"


def test_wire_frames_of_a_steady_step_are_small() -> None:
    """Cost follows change: a steady decode step takes a few bytes on the wire, not one a request."""
    frames = LeaderLog().append(GenerateDecision(1_000_000))
    assert sum(map(len, frames)) < 48
