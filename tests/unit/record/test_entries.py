"""Events and commands survive encoding and decoding."""

from __future__ import annotations

import typing
from array import array

import msgspec
import pytest

from vsched.errors import RecordError
from vsched.failures import EncodeErrorKind, LostTooOften, ProcessExited
from vsched.kernel.commands import (
    Accept,
    AdmitArrival,
    Decide,
    EmitTokens,
    Notice,
    RejectArrival,
)
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
from vsched.record.entries import (
    decode_command,
    decode_entry,
    encode_commands,
    encode_entry,
    is_notice,
)
from vsched.types import Extent, FinishReason, ItemPlace, MediaItem, Request, SamplingParams

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


def test_entries_cover_every_event() -> None:
    assert {type(event) for event in EVENTS} == set(typing.get_args(Event))


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_entries_keep_an_event(event: Event) -> None:
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


def test_entries_refuse_an_array_that_is_longer_than_it_says() -> None:
    body = msgspec.msgpack.encode(
        [0, 0, ["Stepped", 1, [1, bytes(8)], [], 0, "generate", [], 0, 0], [], b""]
    )
    with pytest.raises(RecordError, match="an array of 1 numbers has 8 bytes"):
        decode_entry(body)


def decide(prompt: list[int]) -> Decide:
    data = RequestData(
        tokens=array("i", prompt).tobytes(),
        prompt_length=len(prompt),
        items=[ItemPlace(1, 4, b"4 x 4")],
        sampling=SamplingParams(),
        stop_token_ids=(1,),
    )
    joined = [Join(1, 0, 0, len(prompt), [4], data), Join(2, 1, 0, 3, [5], None)]
    return Decide("generate", GenerateDecision(9, joined=joined))


def test_entries_hold_a_digest_in_place_of_a_prompt() -> None:
    bodies, digest = encode_commands([Accept("a", 1), decide([1] * 5000)])
    same, other = (
        encode_commands([Accept("a", 1), decide(tokens)]) for tokens in ([1] * 5000, [2] * 5000)
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


def test_entries_know_a_notice() -> None:
    bodies, digest = encode_commands([Notice("words"), EmitTokens(1)])
    assert [is_notice(body) for body in bodies] == [True, False]
    assert digest == b""


@pytest.mark.parametrize(
    "body", [b"", b"\x93", msgspec.msgpack.encode([0, 0, ["Exec", "x"], [], b""])]
)
def test_entries_refuse_what_is_none(body: bytes) -> None:
    with pytest.raises(RecordError):
        decode_entry(body)


def test_renamed_classes_keep_their_names_in_records() -> None:
    body = encode_entry(3, 5, Arrived(1), [AdmitArrival(1), RejectArrival(2)])
    _, _, event, commands, _ = msgspec.msgpack.decode(body)
    assert [row[0] for row in (event, *commands)] == ["Knocked", "Enter", "TurnAway"]
    entry = decode_entry(body)
    assert entry.event == Arrived(1)
    assert [*map(decode_command, entry.commands)] == [AdmitArrival(1), RejectArrival(2)]
