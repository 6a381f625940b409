"""The entries of a record: a header with a snapshot, then each event with the commands that followed.

Events and commands are the kernel's structs, written as `[name, field, …]`. Two fields are shortened: the tokens of a
step end with the last slot in use, and the request data in a decision, which the event `Submitted` has already, is
replaced by a digest.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, cast, get_args

import msgspec

from vsched.errors import RecordError
from vsched.kernel.commands import Command, Decide
from vsched.kernel.decisions import GenerateDecision
from vsched.kernel.events import Event


class SegmentHeader(msgspec.Struct, frozen=True, array_like=True):
    """The first record of a segment.

    Attributes:
        run: A random number that the segments of one record share.
        segment: Its number, from 1.
        version: The version of vsched.
        started_s: The time when this segment began, seconds since 1970.
        number: Number of the first event.
        config: The configuration, as plain values.
        limits: The kernel's limits, as plain values.
        policies: The class and fields of each configured policy, for readers.
        state: The snapshot of the kernel before that event; see `vsched.policy_host.snapshot`.
        layout: The layout of `state`; 1 in records of earlier versions.
    """

    run: bytes
    segment: int
    version: str
    started_s: float
    number: int
    config: dict[str, Any]
    limits: dict[str, Any]
    policies: dict[str, str]
    state: bytes
    layout: int = 1


_NAMES = {"Arrived": "Knocked", "AdmitArrival": "Enter", "RejectArrival": "TurnAway"}
"""Names in records of renamed classes, so that older records stay readable."""


def _name(cls: type) -> str:
    return _NAMES.get(cls.__name__, cls.__name__)


_CLASSES: dict[str, type[Any]] = {_name(cls): cls for cls in (*get_args(Event), *get_args(Command))}


class _EventFrame(msgspec.Struct, frozen=True, array_like=True):
    number: int
    now_ns: int
    event: msgspec.Raw
    commands: list[msgspec.Raw]
    data_digest: bytes = b""


class RecordedEvent(msgspec.Struct, frozen=True):
    """An event, and the commands that followed as bytes to compare."""

    number: int
    now_ns: int
    event: Event
    commands: list[bytes]
    data_digest: bytes


def decode_command(body: bytes | msgspec.Raw) -> Command:
    """Return a command from bytes.

    Raises:
        RecordError: If they are no command.
    """
    return cast("Command", _decode(body))


def _decode(body: bytes | msgspec.Raw) -> Event | Command:
    """Return the event or the command of `[name, field, …]`."""
    try:
        name, *values = msgspec.msgpack.decode(body)
        cls = _CLASSES[name]
        names = cls.__struct_encode_fields__
        if len(values) > len(names):
            raise ValueError(f"{name} has {len(values)} fields, not up to {len(names)}")
        fields = dict(zip(names, values, strict=False))  # an older record may lack the last ones
        return cast("Event | Command", msgspec.convert(fields, cls, dec_hook=_unpack))
    except (ValueError, TypeError, KeyError) as error:  # an error of msgspec is a ValueError
        raise RecordError(f"an event or a command cannot be read: {error}") from error


def _pack(one: Any) -> tuple[int, bytes]:
    """Encode an int32 array as its length and its bytes without the last elements that are -1."""
    if type(one) is array and one.itemsize == 4:
        # -1 is four bytes of 255, and no token ends in one.
        return len(one), one.tobytes().rstrip(b"\xff")
    raise NotImplementedError(f"{type(one).__qualname__} cannot be recorded")


def _unpack(_: type, packed: Any) -> array[int]:
    length, data = packed
    missing = length * 4 - len(data)
    if missing < 0:
        raise ValueError(f"an array of {length} numbers has {len(data)} bytes")
    return array("i", data + b"\xff" * missing)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_headers = msgspec.msgpack.Decoder(SegmentHeader)
_entries = msgspec.msgpack.Decoder(_EventFrame)
_astuple = msgspec.structs.astuple


REMOVED_SETTINGS = (("cluster", "direct"), ("cluster", "encrypt_rows"))
"""Settings in the configurations of older records, without influence on decisions."""


def decode_header(body: bytes) -> SegmentHeader:
    """Return a header from bytes, without settings that are gone.

    Raises:
        RecordError: If they are no header.
    """
    try:
        header = _headers.decode(body)
    except msgspec.MsgspecError as error:
        raise RecordError(f"a segment does not begin with a header: {error}") from error
    for section, name in REMOVED_SETTINGS:
        if isinstance(table := header.config.get(section), dict):
            table.pop(name, None)
    return header


def encode_entry(number: int, now_ns: int, event: Event, commands: Sequence[Command]) -> bytes:
    """Return the bytes of an entry."""
    rows, digest = _rows(commands)
    return _encoder.encode((number, now_ns, (_name(type(event)), *_astuple(event)), rows, digest))


def encode_commands(commands: Sequence[Command]) -> tuple[list[bytes], bytes]:
    """Return the bytes of each command in an entry, and the digest of the request data, which they lack."""
    rows, digest = _rows(commands)
    return [_encoder.encode(row) for row in rows], digest


def _rows(commands: Sequence[Command]) -> tuple[list[tuple[Any, ...]], bytes]:
    rows: list[tuple[Any, ...]] = []
    data = None
    for command in commands:
        if type(command) is Decide:
            decision = command.decision
            if type(decision) is GenerateDecision and decision.joined:
                data = data or blake2b(digest_size=16)
                data.update(_encoder.encode([join.data for join in decision.joined]))
                joined = [msgspec.structs.replace(join, data=None) for join in decision.joined]
                decision = msgspec.structs.replace(decision, joined=joined)
            rows.append(("Decide", command.group, decision))
        else:
            rows.append((_name(type(command)), *_astuple(command)))
    return rows, data.digest() if data is not None else b""


def decode_entry(body: bytes) -> RecordedEvent:
    """Return an entry from bytes.

    Raises:
        RecordError: If they are no entry.
    """
    try:
        entry = _entries.decode(body)
    except msgspec.MsgspecError as error:
        raise RecordError(f"an entry cannot be read: {error}") from error
    event, commands = cast("Event", _decode(entry.event)), [bytes(one) for one in entry.commands]
    return RecordedEvent(entry.number, entry.now_ns, event, commands, entry.data_digest)
