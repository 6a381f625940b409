"""Messages between a group's leader and its ranks, and the numbered log that carries decisions.

Leader to rank: one frame with a header (sequence number, rolling digest, turn) and a msgpack body. Each entry's digest
covers the previous digest, so equal digests mean that all decisions so far are equal and in the same order. A follower
that finds a gap or a different digest stops; it never computes on.

Processes that serve two groups follow two logs. Turns, which both leaders draw from one counter, fix the order in which
steps of the two are carried out: otherwise one rank would wait in a collective of one group for a peer that waits in a
collective of the other. An encode step may pause for steps of the other group: each `Continue` has a turn.

An empty frame is not an entry: it says that the leader is alive while its next entry is still being transferred.

Rank to leader: one frame with a checksum and a msgpack body, which is a tagged union. Nothing is ever pickled.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from hashlib import blake2b
from zlib import crc32

import msgspec

from vsched.errors import RankDesync
from vsched.failures import EncodeErrorKind, ErrorKind
from vsched.kernel.decisions import EncodeDecision, GenerateDecision
from vsched.kernel.events import Drafted, Finished
from vsched.memory import Sized
from vsched.policy import RankMemory, Reservation
from vsched.probes import probe

_HEADER = struct.Struct("<Q16sQ")
_COVERED = 24  # the digest covers the frame from the turn on
_CHECKSUM_BYTES = 4
FRAME_BYTES_MAX = 1 << 30
"""Larger frames end the connection; the log-probabilities of a large vocabulary are 2 MB for each slot."""
ON_THE_WAY = b""
"""Empty frame: the leader's next message is being transferred."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """An empty decision: the leader is alive and has nothing to do."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """Finish and exit."""


class SizeKv(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    """Drop the current KV cache, build one for `tokens` tokens, and run the profiling step while headroom is held.

    With 0 tokens, nothing is built. With `probe`, the profiling step may use sequences of any length; otherwise only
    sequences that fit into the cache. With `reset_peers`, some ranks failed and others did not: all set up their
    process group again, so that none retries alone.
    """

    tokens: int
    profile: bool
    headroom_bytes: int
    probe: bool = False
    reset_peers: bool = False


class AcceptKv(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """Serve with the current KV cache."""

    blocks: int


class Continue(msgspec.Struct, frozen=True, array_like=True, tag="n"):
    """Resume a paused encode step for `layers` layers, 0 for the rest; no-op if the step is not paused."""

    step: int
    layers: int


class RunHook(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Run a worker's periodic collective task, by name; every rank runs it at the same position of its log."""

    name: str


class AddAdapter(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """Add the adapter in this folder to the layers, under a number that is never reused; later steps may use it."""

    number: int
    path: str


class RemoveAdapter(msgspec.Struct, frozen=True, array_like=True, tag="u"):
    """Remove an adapter, if present; no later step uses it."""

    number: int


LogEntry = (
    GenerateDecision
    | EncodeDecision
    | Continue
    | Heartbeat
    | Stop
    | SizeKv
    | AcceptKv
    | RunHook
    | AddAdapter
    | RemoveAdapter
)


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a rank; `secret` proves that the leader started it."""

    rank: int
    secret: str


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress of loading, 0 to 1."""

    what: str
    fraction: float


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A rank has loaded its weights; `memory` is measured after that.

    A generate rank waits for the size of its KV cache. An encode rank has run its largest batch since, for which it
    needs the `reservation`.
    """

    memory: RankMemory
    reservation: Reservation | None = None


class ThreadsInUse(msgspec.Struct, frozen=True, tag=True):
    """A rank's process computes with `active` of its `total` threads; sent after each change."""

    active: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A rank is ready to serve. `memory` is its part of the memory table, in bytes by name.

    `hooks` are the worker's periodic tasks and their intervals in seconds. `threads` is None if the worker does not
    report it. See `vsched.worker.contract.Worker`.
    """

    kv_blocks: int
    memory: dict[str, int]
    hooks: dict[str, float] = {}
    threads: ThreadsInUse | None = None


class SlotLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of a slot's token and the top alternatives."""

    slot: int
    logprob: float
    top: list[tuple[int, float]]


class PromptPiece(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of prompt tokens from position `start` on; little-endian, as in `PromptLogprobs`."""

    number: int
    start: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes


class GenerateResult(msgspec.Struct, frozen=True, tag=True):
    """Result of a generate step.

    Shape: `tokens` and `numbers` are little-endian int32 by slot: the slot's output token or -1, and the number of its
    request. `drafted` has the further tokens of slots with speculative decoding; the `logprobs` of a slot are in the
    order of its tokens. `swap_blocks` blocks were copied in `swap_ns`, a part of `busy_ns`.
    """

    step: int
    tokens: bytes
    numbers: bytes
    finished: list[Finished]
    logprobs: list[SlotLogprob]
    busy_ns: int
    prompts: list[PromptPiece] = []
    drafted: list[Drafted] = []
    swap_ns: int = 0
    swap_blocks: int = 0


class EncodeResult(msgspec.Struct, frozen=True, tag=True):
    """Result of an encode step, or its failure."""

    step: int
    failure: EncodeErrorKind | None
    busy_ns: int


class Paused(msgspec.Struct, frozen=True, tag=True):
    """An encode step has paused after `layers` more layers, which took `busy_ns`; the rank waits for a `Continue`."""

    step: int
    layers: int
    busy_ns: int


class StepCheck(msgspec.Struct, frozen=True, tag=True):
    """Checksum of a step on a rank other than the first: equal results have an equal `check`."""

    step: int
    check: bytes


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """Liveness of a rank's process, sent by a thread that is independent of the log follower."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A rank's reply to a heartbeat or hook: alive, and at this entry. `memory` as in `Ready`.

    `kernels_late` is the number of kernels that its process has compiled, or read from disk, since it was ready.
    """

    seq: int
    memory: dict[str, int]
    kernels_late: int = 0


class AdapterChanged(msgspec.Struct, frozen=True, tag=True):
    """A rank's reply to `AddAdapter` or `RemoveAdapter` at this entry; `error` is the reason that adding it failed."""

    seq: int
    error: str = ""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank stops; `error` is the name of the exception type, for people."""

    kind: ErrorKind
    error: str
    message: str


RankReport = (
    Hello
    | Loading
    | Loaded
    | Sized
    | Ready
    | GenerateResult
    | EncodeResult
    | Paused
    | StepCheck
    | Pulse
    | Beat
    | ThreadsInUse
    | AdapterChanged
    | RankFailed
)

_encoder = msgspec.msgpack.Encoder()
_entry_decoder: msgspec.msgpack.Decoder[LogEntry] = msgspec.msgpack.Decoder(LogEntry)
_report_decoder: msgspec.msgpack.Decoder[RankReport] = msgspec.msgpack.Decoder(RankReport)


def encode_report(report: RankReport) -> bytes:
    """Encode a rank's report as a frame: a checksum and the body."""
    body = _encoder.encode(report)
    return crc32(body).to_bytes(_CHECKSUM_BYTES, "little") + body


def decode_report(frame: bytes) -> RankReport:
    """Decode a rank's report.

    Raises:
        msgspec.DecodeError: If the frame is malformed or damaged.
    """
    body = memoryview(frame)[_CHECKSUM_BYTES:]
    if frame[:_CHECKSUM_BYTES] != crc32(body).to_bytes(_CHECKSUM_BYTES, "little"):
        raise msgspec.DecodeError("the checksum of a report is wrong")
    return _report_decoder.decode(body)


def undamaged_report(frame: bytes) -> RankReport | None:
    """Decode a rank's report; return None if the frame is malformed or damaged."""
    try:
        return decode_report(frame)
    except (msgspec.DecodeError, ValueError):
        return None


def check_of(result: GenerateResult | EncodeResult) -> bytes:
    """Checksum that is equal on all ranks of a group if a step had the same outcome.

    For a failed encode step it covers only the fact of failure, because the peers of the failing rank know less about
    the reason.
    """
    if isinstance(result, GenerateResult):
        more = _encoder.encode(result.drafted) if result.drafted else b""
        return blake2b(result.tokens + result.numbers + more, digest_size=8).digest()
    return b"failed" if result.failure else b""


class LeaderLog:
    """Numbers decisions and keeps the rolling digest; leaders of the same processes share `turns`.

    A turn is the number of a step among those of all logs that the same processes follow.
    """

    def __init__(self, turns: Iterator[int] | None = None) -> None:
        self.seq = 0
        self.digest = bytes(16)
        self._turns = turns or itertools.count(1)

    def append(self, entry: LogEntry) -> bytes:
        """Encode the next entry as a frame, which is the same for every rank."""
        body = _encoder.encode(entry)
        turn = 0
        if isinstance(entry, GenerateDecision | EncodeDecision | Continue | RunHook):
            turn = next(self._turns)
        covered = turn.to_bytes(8, "little") + body
        self.seq += 1
        self.digest = blake2b(self.digest + covered, digest_size=16).digest()
        return self.seq.to_bytes(8, "little") + self.digest + covered


class FollowerLog:
    """Checks that received frames are the leader's log, without gaps or differences.

    `turn` is that of the last entry: its number among the steps of all logs of this process, 0 for other entries.
    """

    def __init__(self) -> None:
        self.seq = 0
        self.turn = 0
        self.digest = bytes(16)

    def accept(self, frame: bytes) -> LogEntry:
        """Decode and check the entry of a frame.

        Raises:
            RankDesync: If there is a gap or a different digest, or the frame is not an entry.
        """
        if len(frame) < _HEADER.size:
            raise RankDesync(
                f"after entry {self.seq}: a frame of {len(frame)} bytes is not a log entry"
            )
        seq, digest, turn = _HEADER.unpack_from(frame)
        if seq != self.seq + 1:
            probe("log.gap")
            raise RankDesync(f"heard entry {seq} of the decision log, expected {self.seq + 1}")
        expected = blake2b(self.digest + frame[_COVERED:], digest_size=16).digest()
        if digest != expected:
            probe("log.digest_differs")
            raise RankDesync(
                f"entry {seq} of the decision log has digest {digest.hex()}, here it is "
                f"{expected.hex()}: leader and rank decided differently before it"
            )
        try:
            entry = _entry_decoder.decode(memoryview(frame)[_HEADER.size :])
        except msgspec.DecodeError as error:
            raise RankDesync(f"entry {seq} of the decision log cannot be read: {error}") from error
        self.seq, self.turn, self.digest = seq, turn, expected
        return entry
