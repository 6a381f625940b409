"""What travels between a group's leader and its ranks, and the numbered log that carries decisions.

Leader to rank: two frames, a header (sequence number, rolling digest) and a msgpack body. Each entry's digest covers
the digest before it, so equal digests mean that everything decided so far is equal, in the same order. A follower that
sees a gap or another digest stops; it never computes on.

Rank to leader: one msgpack frame, a tagged union. Nothing is ever pickled.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

import msgspec

from vsched.errors import RankDesync
from vsched.kernel.decisions import EncodeDecision, GenerateDecision
from vsched.kernel.events import Finished
from vsched.policy import Outcome, RankMemory, Reservation

_HEADER = struct.Struct("<Q16s")
FRAME_BYTES_MAX = 64 << 20
"""A frame larger than this is not one of ours."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """An empty decision: the leader is alive and has nothing to do."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """Finish and exit."""


class SizeKv(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    """Drop the KV cache that stands, build one of so many tokens, and run the stress while a canary is held.

    The stress of a probe runs sequences of any length; that of another size those that the cache could hold.
    """

    tokens: int
    stress: bool
    canary_bytes: int
    probe: bool = False


class AcceptKv(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """Serve with the KV cache that stands."""

    blocks: int


Entry = GenerateDecision | EncodeDecision | Heartbeat | Stop | SizeKv | AcceptKv


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A rank's first word; `secret` proves that the leader started it."""

    rank: int
    secret: str


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress of loading, 0 to 1."""

    what: str
    fraction: float


class Reserved(msgspec.Struct, frozen=True, tag=True):
    """What an encode rank's worst batch needs; `memory` is measured after loading, before that batch ran."""

    memory: RankMemory
    reservation: Reservation


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A generate rank has its weights, and waits to hear how large the KV cache is to be."""

    memory: RankMemory


class Sized(msgspec.Struct, frozen=True, tag=True):
    """A rank's vote on the last `SizeKv`, and what it measured."""

    outcome: Outcome
    message: str
    memory: RankMemory


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A rank can take work. `memory` is its part of the memory table, in bytes by name."""

    kv_blocks: int
    memory: dict[str, int]


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of the token in a slot, and the best alternatives."""

    slot: int
    logprob: float
    top: list[tuple[int, float]]


class GenerateResult(msgspec.Struct, frozen=True, tag=True):
    """A generate step is done.

    Shape: `tokens` and `numbers` are little-endian int32 by slot: the token that the slot yielded, or -1, and the
    request that it belongs to.
    """

    step: int
    tokens: bytes
    numbers: bytes
    finished: list[Finished]
    logprobs: list[TokenLogprob]
    busy_ns: int


class EncodeResult(msgspec.Struct, frozen=True, tag=True):
    """An encode step is done, or failed with a message that is safe to show."""

    step: int
    error: str
    busy_ns: int


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A rank's answer to a heartbeat: alive and up to this entry. `memory` as in `Ready`."""

    seq: int
    memory: dict[str, int]


class Failure(msgspec.Struct, frozen=True, tag=True):
    """A rank gives up; `kind` is the name of the error type."""

    kind: str
    message: str


Report = (
    Hello
    | Loading
    | Reserved
    | Loaded
    | Sized
    | Ready
    | GenerateResult
    | EncodeResult
    | Beat
    | Failure
)

_encoder = msgspec.msgpack.Encoder()
_entry_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)
_report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode_report(report: Report) -> bytes:
    """Return the frame of a rank's report."""
    return _encoder.encode(report)


def decode_report(frame: bytes) -> Report:
    """Read a rank's report.

    Raises:
        msgspec.DecodeError: When the frame is not one.
    """
    return _report_decoder.decode(frame)


class LeaderLog:
    """Numbers decisions and keeps the rolling digest."""

    def __init__(self) -> None:
        self.seq = 0
        self.digest = bytes(16)

    def append(self, entry: Entry) -> list[bytes]:
        """Return the frames of the next entry, the same for every rank."""
        body = _encoder.encode(entry)
        self.seq += 1
        self.digest = _roll(self.digest, body)
        return [_HEADER.pack(self.seq, self.digest), body]


class FollowerLog:
    """Checks that what a rank hears is the leader's log, without gap or difference."""

    def __init__(self) -> None:
        self.seq = 0
        self.digest = bytes(16)

    def accept(self, frames: list[bytes]) -> Entry:
        """Return the entry of these frames.

        Raises:
            RankDesync: On a gap, another digest, or frames that are no entry.
        """
        if len(frames) != 2 or len(frames[0]) != _HEADER.size:
            raise RankDesync(f"after entry {self.seq}: {len(frames)} frames that are no log entry")
        seq, digest = _HEADER.unpack(frames[0])
        if seq != self.seq + 1:
            raise RankDesync(f"heard entry {seq} of the decision log, expected {self.seq + 1}")
        expected = _roll(self.digest, frames[1])
        if digest != expected:
            raise RankDesync(
                f"entry {seq} of the decision log has digest {digest.hex()}, here it is "
                f"{expected.hex()}: leader and rank decided differently before it"
            )
        try:
            entry = _entry_decoder.decode(frames[1])
        except msgspec.DecodeError as error:
            raise RankDesync(f"entry {seq} of the decision log cannot be read: {error}") from error
        self.seq, self.digest = seq, expected
        return entry


def _roll(digest: bytes, body: bytes) -> bytes:
    return blake2b(digest + body, digest_size=16).digest()
