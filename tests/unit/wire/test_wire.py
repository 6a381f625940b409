"""The decision log on the wire: round trips, and a follower that detects every difference."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from hashlib import blake2b

import msgspec
import pytest

from vsched.errors import RankDesync
from vsched.failures import EncodeErrorKind, ErrorKind
from vsched.kernel.decisions import (
    ChunkItem,
    ChunkPlan,
    EncodeDecision,
    EncodeTask,
    GenerateDecision,
    Join,
    Leave,
    RequestData,
)
from vsched.kernel.events import Drafted, Finished
from vsched.types import ArraySpec, Extent, FinishReason, ItemPlace, SamplingParams
from vsched.wire import (
    EncodeResult,
    FollowerLog,
    GenerateResult,
    Heartbeat,
    LeaderLog,
    LogEntry,
    PromptPiece,
    RankFailed,
    RankReport,
    Ready,
    RunHook,
    SizeKv,
    SlotLogprob,
    ThreadsInUse,
    check_of,
    decode_report,
    encode_report,
)

PLACE = ItemPlace(0, 4, b"of it", ((0, 2), (3, 5)))
SAMPLING = SamplingParams(temperature=0.5, stop=("x",), logprobs=2)
DATA = RequestData(b"\1\0\0\0", 1, [PLACE], SAMPLING, (2, 3), 7)
FULL = GenerateDecision(
    7,
    forgotten=[3],
    left=[Leave(1, 0, keep=True)],
    joined=[Join(4, 2, 16, 18, [5, 6], DATA), Join(5, 3, 0, 1, [7], None)],
    grown=[1, 9],
    chunks=[ChunkPlan(2, 16, 18, [ChunkItem(14, 4, [8])])],
)
ARRAYS = (ArraySpec("pixels", "float32", (2, 8)), ArraySpec("size", "int64", (2,)))
TASK = EncodeTask(b"k" * 32, 2, Extent(64, 128), [0, 1], ARRAYS, b"of it", adapter=7)
ENTRIES: list[LogEntry] = [
    FULL,
    EncodeDecision(1, [TASK], time_slice_ns=5, layers=3),
    SizeKv(64, profile=True, headroom_bytes=1, reset_peers=True),
]
END, LOGPROB = Finished(1, 9, FinishReason.STOP), SlotLogprob(1, -0.5, [(3, -1.0)])
PIECE = PromptPiece(9, 1, b"\1\2\3\4", b"\5\6\7\0", b"", b"")
REPORTS: list[RankReport] = [
    GenerateResult(3, b"\1\2", b"\3", [END], [LOGPROB], 8, prompts=[PIECE]),
    EncodeResult(4, EncodeErrorKind.FAILED, 5),
    Ready(1 << 40, {"kv": 1 << 40}, {"balance": 60.0}, ThreadsInUse(2, 2)),
    RankFailed(ErrorKind.DESYNC, "RankDesync", "why"),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: type(entry).__name__)
def test_wire_entries_round_trip(entry: LogEntry) -> None:
    """With all contents; tests of the leader and of ranks read the others."""
    assert FollowerLog().accept(LeaderLog().append(entry)) == entry


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_wire_reports_round_trip(report: RankReport) -> None:
    assert decode_report(encode_report(report)) == report


@pytest.mark.parametrize(
    "frame", [b"", b"\x00", b"\xc1", msgspec.msgpack.encode({"type": "Hello"}), b"\x80" * 9]
)
def test_wire_garbage_is_no_report(frame: bytes) -> None:
    """Frames are typed."""
    with pytest.raises(msgspec.DecodeError):
        decode_report(frame)


def test_wire_damaged_report_is_no_report() -> None:
    """Otherwise a flipped bit would be another token, or give a token to another request."""
    tokens = (7).to_bytes(4, "little") * 3
    frame = encode_report(GenerateResult(3, tokens, tokens, [], [], 5))
    for bit in range(8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(msgspec.DecodeError):
            decode_report(bytes(damaged))


Log = list[bytes]


def one_bit(log: Log, place: int) -> Log:
    frame = bytearray(log[1])
    frame[place] ^= 1
    return [log[0], bytes(frame)]


def another_history(log: Log) -> Log:
    other = LeaderLog()
    other.append(GenerateDecision(99))
    return [log[0], other.append(GenerateDecision(2))]


DIFFERENT = "entry 2 .* decided differently"
SPOILED: dict[str, tuple[Callable[[Log], Log], str]] = {
    "without the second": (lambda log: [log[0], log[2]], "heard entry 3 of .*, expected 2"),
    "the second twice": (lambda log: [*log[:2], log[1]], "heard entry 2 of .*, expected 3"),
    "swapped": (lambda log: [log[0], log[2], log[1]], "heard entry 3 of .*, expected 2"),
    "from the middle": (lambda log: log[1:], "heard entry 2 of the decision log, expected 1"),
    "another body": (lambda log: [log[0], log[1][:32] + log[2][32:]], DIFFERENT),
    "a bit of the body": (lambda log: one_bit(log, -1), DIFFERENT),
    "a bit of the digest": (lambda log: one_bit(log, 20), DIFFERENT),
    "a bit of the turn": (lambda log: one_bit(log, 24), DIFFERENT),
    "another history": (another_history, DIFFERENT),
    "no body": (lambda log: [log[0], log[1][:32]], DIFFERENT),
    "nothing": (lambda log: [log[0], b""], "after entry 1: a frame of 0 bytes"),
    "a short header": (lambda log: [log[0], log[1][:31]], "after entry 1: a frame of 31 bytes"),
}


@pytest.mark.parametrize("spoiled", SPOILED)
def test_wire_follower_stops_at_any_difference(spoiled: str) -> None:
    """Gap, duplicate, reorder, another digest, another shape: detected, and not computed."""
    leader, follower = LeaderLog(), FollowerLog()
    spoil, message = SPOILED[spoiled]
    log = spoil([leader.append(GenerateDecision(step)) for step in (1, 2, 3)])
    received = []
    with pytest.raises(RankDesync, match=message):
        received += [follower.accept(frame) for frame in log]
    assert follower.seq < 3


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", msgspec.msgpack.encode(["x", 1]), msgspec.msgpack.encode(["g", "one"])]
)
def test_wire_follower_refuses_a_body_that_is_no_decision(body: bytes) -> None:
    """Even with the right number and digest."""
    turn = bytes(8)
    digest = blake2b(bytes(16) + turn + body, digest_size=16).digest()
    follower = FollowerLog()
    with pytest.raises(RankDesync, match="entry 1 of the decision log cannot be read"):
        follower.accept(struct.pack("<Q16s", 1, digest) + turn + body)
    assert (follower.seq, follower.digest) == (0, bytes(16)), "a refused entry is not counted"


def test_wire_steps_of_all_logs_have_turns() -> None:
    """A follower of two logs knows the one order in which their steps were decided."""
    turns = itertools.count(1)
    encode, generate = LeaderLog(turns), LeaderLog(turns)
    received = {"encode": FollowerLog(), "generate": FollowerLog()}
    order = []
    for name, log, entry in (
        ("generate", generate, GenerateDecision(1)),
        ("encode", encode, EncodeDecision(1, [])),
        ("encode", encode, Heartbeat()),
        ("encode", encode, RunHook("balance")),
        ("generate", generate, SizeKv(64, profile=False, headroom_bytes=0)),
        ("generate", generate, GenerateDecision(2)),
    ):
        received[name].accept(log.append(entry))
        order.append(received[name].turn)
    assert order == [1, 2, 0, 3, 0, 4]


def test_wire_checks_distinguish_results() -> None:
    """Another token or another request changes the check; times do not."""
    result = GenerateResult(3, b"\1\2", b"\3\4", [], [], 8)
    changes: list[dict[str, object]] = [
        {"tokens": b"\1\3"},
        {"numbers": b"\3\5"},
        {"drafted": [Drafted(1, 2, [3])]},
        {"drafted": [Drafted(1, 2, [4])]},
        {"busy_ns": 9},
    ]
    checks = [check_of(msgspec.structs.replace(result, **change)) for change in changes]
    assert checks[-1] == check_of(result)
    assert len(set(checks)) == 5
    assert len(checks[0]) == 8
