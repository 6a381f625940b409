"""What travels between a group's leader and its ranks, and the numbered log that carries decisions.

Leader to rank: one frame, a header (sequence number, rolling digest, turn) and a msgpack body. Each entry's digest
covers the digest before it, so equal digests mean that everything decided so far is equal, in the same order. A
follower that sees a gap or another digest stops; it never computes on.

Processes that serve two groups follow two logs. Turns, which both leaders draw from one counter, say in which order the
steps of the two are to be carried out: else one rank would wait in a collective of the one group for a peer that waits
in a collective of the other. An encode step may pause for those of the other group: each `Continue` has a turn.

An empty frame is no entry: it says that the leader lives while its next entry is on the way, behind bytes.

Rank to leader: one frame, a checksum and a msgpack body, which is a tagged union. Nothing is ever pickled.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from zlib import crc32

import msgspec

from vsched.errors import RankDesync
from vsched.failures import EncodeErrorKind, ErrorKind
from vsched.kernel.decisions import EncodeDecision, GenerateDecision
from vsched.kernel.events import Drafted, Finished
from vsched.policy import AttemptOutcome, RankMemory, Reservation
from vsched.probes import probe

_HEADER = struct.Struct("<Q16sQ")
_COVERED = 24  # from the turn on, a digest covers the frame
_CHECKSUM_BYTES = 4
FRAME_BYTES_MAX = 64 << 20
"""A frame larger than this is not one of ours."""
ON_THE_WAY = b""
"""What a rank hears while what its leader said is on the way."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """An empty decision: the leader is alive and has nothing to do."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """Finish and exit."""


class SizeKv(msgspec.Struct, frozen=True, array_like=True, tag="k"):
    """Drop the KV cache that stands, build one of `tokens` tokens, and do the profiling run while headroom is held.

    With 0 tokens, nothing is built. A probe profiles sequences of any length; another order those that the cache could
    hold. With `renew`, some rank failed where others did not: all meet their peers anew, so that none retries alone.
    """

    tokens: int
    profile: bool
    headroom_bytes: int
    probe: bool = False
    renew: bool = False


class AcceptKv(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """Serve with the KV cache that stands."""

    blocks: int


class Continue(msgspec.Struct, frozen=True, array_like=True, tag="n"):
    """Go on with an encode step that paused: `layers` layers more, 0 for the rest; nothing where it does not wait."""

    step: int
    layers: int


class RunHook(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """Run a worker's periodic collective work, by name; every rank at the same place of its log."""

    name: str


class AddAdapter(msgspec.Struct, frozen=True, array_like=True, tag="l"):
    """Add the adapter in this folder to the layers, under a number that is used once; steps after this may name it."""

    number: int
    path: str


class RemoveAdapter(msgspec.Struct, frozen=True, array_like=True, tag="u"):
    """Take an adapter away, where it is there; no step after this names it."""

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

    outcome: AttemptOutcome
    message: str
    memory: RankMemory


class ThreadsInUse(msgspec.Struct, frozen=True, tag=True):
    """A rank's process computes with `active` of its `total` threads; sent on each change."""

    active: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A rank can take work. `memory` is its part of the memory table, in bytes by name.

    `hooks` are the worker's periodic works and their intervals in seconds; see
    `vsched.worker.capabilities.PeriodicWork`. `threads` is None if the worker does not say; see `UsesThreads` there.
    """

    kv_blocks: int
    memory: dict[str, int]
    hooks: dict[str, float] = {}
    threads: ThreadsInUse | None = None


class SlotLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of the token in a slot, and the best alternatives."""

    slot: int
    logprob: float
    top: list[tuple[int, float]]


class PromptPiece(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of tokens of a prompt, from position `start` on; little-endian, as of `PromptLogprobs`."""

    number: int
    start: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes


class GenerateResult(msgspec.Struct, frozen=True, tag=True):
    """A generate step is done.

    Shape: `tokens` and `numbers` are little-endian int32 by slot: the token that the slot yielded, or -1, and the
    request that it belongs to. `drafted` has the further tokens of slots that drafts were run for; `logprobs` of a slot
    are in the order of its tokens. `wanted` are the hooks that the worker asks for. In `swap_ns` of `busy_ns`,
    `swap_blocks` blocks were copied.
    """

    step: int
    tokens: bytes
    numbers: bytes
    finished: list[Finished]
    logprobs: list[SlotLogprob]
    busy_ns: int
    wanted: list[str] = []
    prompts: list[PromptPiece] = []
    drafted: list[Drafted] = []
    swap_ns: int = 0
    swap_blocks: int = 0


class EncodeResult(msgspec.Struct, frozen=True, tag=True):
    """An encode step is done, or failed."""

    step: int
    failure: EncodeErrorKind | None
    busy_ns: int
    wanted: list[str] = []


class Paused(msgspec.Struct, frozen=True, tag=True):
    """`layers` layers of an encode step are done, in `busy_ns`, and more are left: the rank waits for a `Continue`."""

    step: int
    layers: int
    busy_ns: int


class StepCheck(msgspec.Struct, frozen=True, tag=True):
    """What a rank other than the first says of a step: `check` is equal where the results are."""

    step: int
    check: bytes


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """A rank's process runs, whatever it is doing; from a thread beside the one that follows the log."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A rank's answer to a heartbeat or a hook: alive and up to this entry. `memory` as in `Ready`.

    `kernels_late` is how many kernels its process compiled, or read from disk, since it was ready.
    """

    seq: int
    memory: dict[str, int]
    kernels_late: int = 0


class AdapterChanged(msgspec.Struct, frozen=True, tag=True):
    """A rank's answer to `AddAdapter` or `RemoveAdapter` at this entry; `error` says why it has not added it."""

    seq: int
    error: str = ""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank gives up; `error` is the name of the error's type, for people."""

    kind: ErrorKind
    error: str
    message: str


RankReport = (
    Hello
    | Loading
    | Reserved
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
    """Return the frame of a rank's report: a checksum, and the body."""
    body = _encoder.encode(report)
    return crc32(body).to_bytes(_CHECKSUM_BYTES, "little") + body


def decode_report(frame: bytes) -> RankReport:
    """Read a rank's report.

    Raises:
        msgspec.DecodeError: When the frame is not one, or was damaged.
    """
    body = memoryview(frame)[_CHECKSUM_BYTES:]
    if frame[:_CHECKSUM_BYTES] != crc32(body).to_bytes(_CHECKSUM_BYTES, "little"):
        raise msgspec.DecodeError("the checksum of a report is wrong")
    return _report_decoder.decode(body)


def undamaged_report(frame: bytes) -> RankReport | None:
    """Read a rank's report; return nothing when the frame is not one, or was damaged."""
    try:
        return decode_report(frame)
    except (msgspec.DecodeError, ValueError):
        return None


def check_of(result: GenerateResult | EncodeResult) -> bytes:
    """Return what is equal on all ranks of a group where a step had the same outcome.

    Of a failed encode step only that it failed: the peers of the rank where it did know less about why.
    """
    if isinstance(result, GenerateResult):
        more = _encoder.encode(result.drafted) if result.drafted else b""
        return blake2b(result.tokens + result.numbers + more, digest_size=8).digest()
    return b"failed" if result.failure else b""


class Turns:
    """Counts the steps of all logs that the same processes follow."""

    def __init__(self) -> None:
        self.last = 0


class LeaderLog:
    """Numbers decisions and keeps the rolling digest; leaders of the same processes share `turns`."""

    def __init__(self, turns: Turns | None = None) -> None:
        self.seq = 0
        self.digest = bytes(16)
        self._turns = turns or Turns()

    def append(self, entry: LogEntry) -> bytes:
        """Return the frame of the next entry, the same for every rank."""
        body = _encoder.encode(entry)
        turn = 0
        if isinstance(entry, GenerateDecision | EncodeDecision | Continue | RunHook):
            turn = self._turns.last = self._turns.last + 1
        covered = turn.to_bytes(8, "little") + body
        self.seq += 1
        self.digest = blake2b(self.digest + covered, digest_size=16).digest()
        return self.seq.to_bytes(8, "little") + self.digest + covered


class FollowerLog:
    """Checks that what a rank hears is the leader's log, without gap or difference.

    `turn` is that of the last entry: its number among the steps of all logs of this process, 0 for other entries.
    """

    def __init__(self) -> None:
        self.seq = 0
        self.turn = 0
        self.digest = bytes(16)

    def accept(self, frame: bytes) -> LogEntry:
        """Return the entry of this frame.

        Raises:
            RankDesync: On a gap, another digest, or a frame that is no entry.
        """
        if len(frame) < _HEADER.size:
            raise RankDesync(
                f"after entry {self.seq}: a frame of {len(frame)} bytes is no log entry"
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
