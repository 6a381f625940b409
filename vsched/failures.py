"""Why ranks fail: a closed set of values, with their facts, from the rank that notices a failure to the client.

A failure travels as a value: over the wire, through the kernel's events, into the record and the statistics. It is put
into words where somebody reads it, by `str()`, and nothing reads the words again.
"""

from __future__ import annotations

import enum
import signal

import msgspec


class ErrorKind(enum.StrEnum):
    """What a process failed of; `vsched.errors` has an exception for each but `INTERNAL`."""

    CHECKPOINT = "checkpoint"
    CONFIG = "config"
    OUT_OF_MEMORY = "out_of_memory"
    MEMORY_LEAK = "memory_leak"
    POLICY = "policy"
    DESYNC = "desync"
    GROUP_LOST = "group_lost"
    PEER_LOST = "peer_lost"
    INTERNAL = "internal"


class EncodeErrorKind(enum.StrEnum):
    """Why an encode step failed while its rank goes on."""

    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"

    @property
    def message(self) -> str:
        """What a client is told."""
        if self is EncodeErrorKind.OUT_OF_MEMORY:
            return "the encoder ran out of memory for this image"
        return "the image could not be encoded"


class _GroupFailure(msgspec.Struct, frozen=True, tag=True):
    """Why a worker group was lost, did not start or will not come back; `groups` are those of its processes.

    A subclass adds facts and the words for them.
    """

    groups: tuple[str, ...]

    def __str__(self) -> str:
        return f"{' and '.join(self.groups)}: {self.words}"

    @property
    def words(self) -> str:
        """What happened, without the groups."""
        raise NotImplementedError


class ProcessExited(_GroupFailure, frozen=True):
    """A rank's process ended by itself; a negative code is the signal that killed it.

    While it starts, `doing` is what it said last. `memory_limit` is the limit on its memory and the settings that say
    so, such as `(4096, "encode.memory_limit")`, where there is one: a library that gets no memory may end its process
    without a word.
    """

    rank: int
    code: int
    doing: str = ""
    memory_limit: tuple[int, str] | None = None

    @property
    def words(self) -> str:
        said = f"rank {self.rank} exited with code {self.code}"
        if self.code < 0:
            said = f"rank {self.rank} was killed by {signal.Signals(-self.code).name}"
        if not self.doing:
            return said
        said += f"; it was last {self.doing}"
        if self.code == -signal.SIGKILL:
            return (
                f"{said}. Where nobody else did so, the memory of the host or of its control group ran out. Remedy: "
                "free memory there, or lower generate.memory_limit, arena.pixel_bytes or arena.embedding_bytes"
            )
        if self.memory_limit is None:
            return said
        limit_bytes, keys = self.memory_limit
        return (
            f"{said}, under a memory limit of {limit_bytes} bytes ({keys}). Libraries that get no memory end their "
            f"process like this. Remedy: raise {keys}; if it ends the same with twice the limit, memory is not the "
            "reason, and what it wrote to standard error is"
        )


class RankStopped(_GroupFailure, frozen=True):
    """A rank reported the error that it stops with; `error` is the name of its type."""

    rank: int
    kind: ErrorKind
    error: str
    message: str

    @property
    def words(self) -> str:
        return f"rank {self.rank} stopped with {self.error}: {self.message}"


class RankSilent(_GroupFailure, frozen=True):
    """Nothing was heard of a rank's process, or of what follows its log."""

    rank: int
    waited_s: float

    @property
    def words(self) -> str:
        return f"rank {self.rank} was silent for {self.waited_s:.0f} s"


class AnswerOverdue(_GroupFailure, frozen=True):
    """A rank did not answer a step, or the periodic work `hook`, in time."""

    rank: int
    step: int
    hook: str
    waited_s: float
    limit_s: float

    @property
    def words(self) -> str:
        what = f"hook {self.hook}" if self.hook else f"step {self.step}"
        return (
            f"rank {self.rank} has not answered {what} for {self.waited_s:.0f} s, "
            f"limit {self.limit_s:g} (deadlines.step_s)"
        )


class StepTooLong(_GroupFailure, frozen=True):
    """The time slices of an encode step took too long together."""

    rank: int
    step: int
    busy_s: float
    limit_s: float

    @property
    def words(self) -> str:
        return (
            f"rank {self.rank} has worked on step {self.step} for {self.busy_s:.0f} s, "
            f"limit {self.limit_s:g} (deadlines.step_s)"
        )


class RankBacklogged(_GroupFailure, frozen=True):
    """A rank is more steps behind than its queue is long."""

    rank: int

    @property
    def words(self) -> str:
        return f"rank {self.rank} is more steps behind than its queue is long"


class RankUnreachable(_GroupFailure, frozen=True):
    """A decision could not be sent to a rank."""

    rank: int

    @property
    def words(self) -> str:
        return f"rank {self.rank} is gone or does not read its decisions"


class HostLost(_GroupFailure, frozen=True):
    """The host that the ranks run on is gone, or cannot be reached; `what` completes the sentence."""

    host: str
    what: str

    @property
    def words(self) -> str:
        return f"host {self.host} {self.what}"


class ReportRefused(_GroupFailure, frozen=True):
    """A rank sent what it must not send; `what` completes the sentence that begins with the rank."""

    rank: int
    what: str

    @property
    def words(self) -> str:
        return f"rank {self.rank} {self.what}"


class RanksDiffer(_GroupFailure, frozen=True):
    """Two ranks of a group computed different results of a step, or came up differently, as `what` says."""

    rank: int
    what: str

    @property
    def words(self) -> str:
        return f"rank {self.rank} {self.what} (RankDesync)"


class NotReady(_GroupFailure, frozen=True):
    """The ranks were not ready in time; `waiting_for` says whom they waited for, if for others."""

    limit_s: float
    waiting_for: str = ""

    @property
    def words(self) -> str:
        reason = f"; {self.waiting_for}" if self.waiting_for else ""
        return f"not ready after {self.limit_s:g} s (deadlines.ready_s){reason}"


class StartFailed(_GroupFailure, frozen=True):
    """An attempt to start raised an error that is none of a rank's."""

    kind: ErrorKind
    message: str

    def __str__(self) -> str:
        return self.message

    @property
    def words(self) -> str:
        return self.message


class LostTooOften(_GroupFailure, frozen=True):
    """Losses came in such quick succession that no further start is tried."""

    @property
    def words(self) -> str:
        return "lost too often"


class RestartedByOperator(_GroupFailure, frozen=True):
    """An operator asked for new ranks."""

    def __str__(self) -> str:
        return self.words

    @property
    def words(self) -> str:
        return "restarted by an operator"


class Simulated(_GroupFailure, frozen=True):
    """A test or a simulation took the group away."""

    @property
    def words(self) -> str:
        return "lost on purpose"


GroupFailure = (
    ProcessExited
    | RankStopped
    | RankSilent
    | AnswerOverdue
    | StepTooLong
    | RankBacklogged
    | RankUnreachable
    | HostLost
    | ReportRefused
    | RanksDiffer
    | NotReady
    | StartFailed
    | LostTooOften
    | RestartedByOperator
    | Simulated
)
