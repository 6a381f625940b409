"""Frames and entries of a record: damage, ends, and values of every kind."""

from __future__ import annotations

import typing
from array import array
from pathlib import Path

import msgspec
import pytest

from vsched.errors import RecordError
from vsched.failures import EncodeErrorKind, LostTooOften, ProcessExited
from vsched.kernel.commands import Accept, AdmitArrival, Decide, RejectArrival
from vsched.kernel.decisions import GenerateDecision, Join, RequestData
from vsched.kernel.events import (
    Aborted,
    Arrived,
    Cleared,
    Drain,
    Encoded,
    EncodeFailed,
    Event,
    Finished,
    GroupLost,
    GroupReady,
    GroupRetired,
    PolicyReplaced,
    Resume,
    Stepped,
    Submitted,
    TimerFired,
    Withdrawn,
)
from vsched.record import files as frames
from vsched.record.entries import decode_command, decode_entry, encode_commands, encode_entry
from vsched.record.files import FORMAT, VERSION, FrameReader, frame
from vsched.types import Extent, FinishReason, ItemPlace, MediaItem, Request, SamplingParams

START = FORMAT + VERSION
BODIES = [b"first", b"second" * 9, b"", b"the last of them"]


def read(path: Path, *, newest: bool = True) -> tuple[list[bytes], int]:
    reader = FrameReader(path, newest=newest)
    return [body for _, body in reader.bodies()], reader.dropped_bytes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.vlog"
    path.write_bytes(START + b"".join(map(frame, BODIES)))
    return path


def test_frames_cut_anywhere_are_read_up_to_the_last_complete_one(path: Path) -> None:
    """A crash may end a file at any byte."""
    whole = path.read_bytes()
    ends = [len(START)]
    for body in BODIES:
        ends.append(ends[-1] + len(frame(body)))
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        complete = sum(end <= length for end in ends[1:])
        dropped = length - ends[complete] if length >= ends[0] else 0
        assert read(path) == (BODIES[:complete], dropped)


def test_frames_cut_in_an_older_segment_are_an_error(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RecordError, match="its end is missing, and newer segments follow"):
        read(path, newest=False)


def test_frames_flipped_in_the_middle_are_an_error_with_the_position(path: Path) -> None:
    """Every byte of a frame counts: its head, lengths included, as well as its body."""
    whole = path.read_bytes()
    start = len(START) + len(frame(BODIES[0]))
    for offset in range(start, start + len(frame(BODIES[1]))):
        damaged = bytearray(whole)
        damaged[offset] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(RecordError, match=f"damaged at byte {start}: whole records follow"):
            read(path)


@pytest.mark.parametrize("tail", [bytes(4096), b"\xb5\x1e" * 40, frame(b"x" * 50)[:-1] + b"y"])
def test_frames_with_garbage_behind_them_are_read_up_to_it(path: Path, tail: bytes) -> None:
    path.write_bytes(path.read_bytes() + tail)
    assert read(path) == (BODIES, len(tail))


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"\x80\x04\x95 any other file", "not a record"),
        (FORMAT + b"9\n", "format 9, this vsched reads format 2"),
    ],
)
def test_frames_of_another_format_are_refused(path: Path, start: bytes, message: str) -> None:
    path.write_bytes(start)
    with pytest.raises(RecordError, match=message):
        read(path)


def test_frames_are_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A length counts only below the limit, which applies to the writer too."""
    monkeypatch.setattr(frames, "FRAME_BYTES_MAX", 20)
    with pytest.raises(RecordError, match="value 21, limit 20 bytes"):
        frame(b"x" * 21)
    with pytest.raises(RecordError, match="damaged at byte"):
        read(path)


ITEM = MediaItem(key=b"k" * 32, tokens=4, offset=1, metadata=b"4 x 4", extent=Extent(64, 128))
REQUEST = Request(
    request_id="a",
    prompt_token_ids=[1, 5, 5, 5, 5, 150_000],
    items=(ITEM,),
    sampling=SamplingParams(
        temperature=0.1,
        stop=("end",),
        stop_token_ids=(3,),
        seed=2**63 - 1,
        min_p=0.1,
        logit_bias=((3, -1.5), (4, 100.0)),
        bad_words=((5,), (6, 7)),
        min_tokens=2,
        presence_penalty=0.5,
    ),
    ttft_target_ms=100,
    cache_salt="tenant",
)
EVENTS: list[Event] = [
    Arrived(7, "tenant", -1, 100, images=2, choices=3, outputs_max=5),
    Withdrawn(7),
    Submitted(REQUEST, (1, 2), arrival_id=8),
    Aborted("a", FinishReason.STOP),
    Stepped(
        3, array("i", [7, -1, 255, -1]), [Finished(0, 1, FinishReason.LENGTH)], 5, "generate-1"
    ),
    Encoded(4, "encode-0"),
    EncodeFailed(5, EncodeErrorKind.FAILED, "encode-1"),
    GroupReady("encode"),
    GroupLost("generate", ProcessExited(("generate",), 1, -9)),
    GroupRetired("generate", LostTooOften(("generate",))),
    Drain("generate"),
    Resume("generate"),
    TimerFired(),
    PolicyReplaced("routing", "too slow"),
    Cleared("a message", "a code"),
]


def test_entries_keep_every_event() -> None:
    assert {type(event) for event in EVENTS} == set(typing.get_args(Event))
    for event in EVENTS:
        entry = decode_entry(encode_entry(7, 2**40, event, []))
        assert entry.event == event
        assert type(entry.event) is type(event)
        assert (entry.number, entry.now_ns, entry.commands) == (7, 2**40, [])


@pytest.mark.parametrize(
    "tokens", [[], [-1], [-1] * 64, [0], [0, -1], [255, 65535, -1, -1], [-1, 2**31 - 1, -1]]
)
def test_entries_leave_out_slots_behind_the_last_in_use(tokens: list[int]) -> None:
    body = encode_entry(0, 0, Stepped(1, array("i", tokens)), [])
    event = decode_entry(body).event
    assert isinstance(event, Stepped)
    assert event.tokens == array("i", tokens)
    wide = encode_entry(0, 0, Stepped(1, array("i", tokens + [-1] * 20)), [])
    assert len(wide) == len(body)


def decide(prompt: list[int]) -> Decide:
    known, items = array("i", prompt).tobytes(), [ItemPlace(1, 4, b"4 x 4")]
    data = RequestData(known, len(prompt), items, SamplingParams(), stop_token_ids=(1,))
    joined = [Join(1, 0, 0, len(prompt), [4], data), Join(2, 1, 0, 3, [5], None)]
    return Decide("generate", GenerateDecision(9, joined=joined))


def test_entries_hold_a_digest_in_place_of_a_prompt() -> None:
    (bodies, digest), same, other = (
        encode_commands([Accept("a", 1), decide([token] * 5000)]) for token in (1, 1, 2)
    )
    assert sum(map(len, bodies)) < 100
    assert (bodies, digest) == same
    assert other[0] == bodies
    assert other[1] != digest
    command = decode_command(bodies[1])
    assert isinstance(command, Decide)
    assert isinstance(command.decision, GenerateDecision)
    assert [join.data for join in command.decision.joined] == [None, None]
    assert command.decision.step == 9


TOO_LONG = ["Stepped", 1, [1, bytes(8)], [], 0, "generate", [], 0, 0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "an entry cannot be read"),
        (b"\x93", "an entry cannot be read"),
        (msgspec.msgpack.encode([0, 0, ["Exec", "x"], [], b""]), "cannot be read: 'Exec'"),
        (msgspec.msgpack.encode([0, 0, TOO_LONG, [], b""]), "an array of 1 numbers has 8 bytes"),
    ],
)
def test_entries_refuse_other_bytes(body: bytes, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        decode_entry(body)


def test_renamed_classes_keep_their_names_in_records() -> None:
    body = encode_entry(3, 5, Arrived(1), [AdmitArrival(1), RejectArrival(2)])
    _, _, event, commands, _ = msgspec.msgpack.decode(body)
    assert [row[0] for row in (event, *commands)] == ["Knocked", "Enter", "TurnAway"]
    entry = decode_entry(body)
    assert entry.event == Arrived(1)
    assert [*map(decode_command, entry.commands)] == [AdmitArrival(1), RejectArrival(2)]


def test_event_of_an_older_record_may_lack_the_last_fields() -> None:
    number, now_ns, event, commands, digest = msgspec.msgpack.decode(
        encode_entry(3, 5, Arrived(1, "a", session="talk"), [])
    )
    older = msgspec.msgpack.encode((number, now_ns, event[:-1], commands, digest))
    assert decode_entry(older).event == Arrived(1, "a")
    newer = msgspec.msgpack.encode((number, now_ns, [*event, 1], commands, digest))
    with pytest.raises(RecordError, match="Knocked has 9 fields, not up to 8"):
        decode_entry(newer)
