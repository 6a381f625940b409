"""Reasons for rank failures: a closed set of values, passed from the rank that detects a failure to the client.

A failure stays a value on the wire, in the kernel's events, in the record and in the statistics. `str()` formats it for
people; no code parses the text.
"""

from __future__ import annotations

import enum
import signal
from typing import ClassVar

import msgspec


class ErrorKind(enum.StrEnum):
    """Type of a process's error; `vsched.errors` has an exception for each except `INTERNAL`."""

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
    """Reason that an encode step failed although its rank continues."""

    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"

    @property
    def message(self) -> str:
        """Error message for the client."""
        if self is EncodeErrorKind.OUT_OF_MEMORY:
            return "the encoder ran out of memory for this image"
        return "the image could not be encoded"


class _GroupFailure(msgspec.Struct, frozen=True, tag=True):
    """Reason that a worker group was lost, failed to start or stays down; `groups` are the groups that it served.

    Subclasses add facts.
    """

    groups: tuple[str, ...]
    text: ClassVar[str]
    """Format of `words`, with the failure as the only argument."""

    def __str__(self) -> str:
        return f"{' and '.join(self.groups)}: {self.words}"

    @property
    def words(self) -> str:
        """Description of the failure, without the groups."""
        return self.text.format(self)


class ProcessExited(_GroupFailure, frozen=True):
    """A rank's process ended on its own; a negative code is the signal that killed it.

    During startup, `doing` is the last progress that it reported. `memory_limit` is its memory limit, if any, and the
    settings that define it, such as `(4096, "encode.memory_limit")`: native libraries may exit without a message when
    an allocation fails.
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
                f"{said}. If no other program did so, the memory of the host or of its control group ran out. Remedy: "
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
    """A rank reported a fatal error; `error` is the name of the exception type."""

    rank: int
    kind: ErrorKind
    error: str
    message: str
    text = "rank {0.rank} stopped with {0.error}: {0.message}"


class RankSilent(_GroupFailure, frozen=True):
    """No message from a rank's process, or from the thread that follows its log, arrived in time."""

    rank: int
    waited_s: float
    text = "rank {0.rank} was silent for {0.waited_s:.0f} s"


class AnswerOverdue(_GroupFailure, frozen=True):
    """A rank did not answer a step, or the periodic task `hook`, in time."""

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
    """The time slices of an encode step exceeded the limit in total."""

    rank: int
    step: int
    busy_s: float
    limit_s: float
    text = (
        "rank {0.rank} has worked on step {0.step} for {0.busy_s:.0f} s, limit {0.limit_s:g} "
        "(deadlines.step_s)"
    )


class RankBacklogged(_GroupFailure, frozen=True):
    """A rank is behind by more steps than its queue can hold."""

    rank: int
    text = "rank {0.rank} is more steps behind than its queue is long"


class RankUnreachable(_GroupFailure, frozen=True):
    """A decision could not be sent to a rank."""

    rank: int
    text = "rank {0.rank} is gone or does not read its decisions"


class HostLost(_GroupFailure, frozen=True):
    """The host of the ranks is gone or unreachable; `what` completes the message."""

    host: str
    what: str
    text = "host {0.host} {0.what}"


class ReportRefused(_GroupFailure, frozen=True):
    """A rank sent an invalid report; `what` completes the message."""

    rank: int
    what: str
    text = "rank {0.rank} {0.what}"


class RanksDiffer(_GroupFailure, frozen=True):
    """Two ranks of a group computed different step results or started differently; `what` completes the message."""

    rank: int
    what: str
    text = "rank {0.rank} {0.what} (RankDesync)"


class NotReady(_GroupFailure, frozen=True):
    """The ranks were not ready in time; `waiting_for` names other groups that they waited for, if any."""

    limit_s: float
    waiting_for: str = ""

    @property
    def words(self) -> str:
        reason = f"; {self.waiting_for}" if self.waiting_for else ""
        return f"not ready after {self.limit_s:g} s (deadlines.ready_s){reason}"


class StartFailed(_GroupFailure, frozen=True):
    """A start raised an error that no rank reported."""

    kind: ErrorKind
    message: str

    text = "{0.message}"

    def __str__(self) -> str:
        return self.message


class LostTooOften(_GroupFailure, frozen=True):
    """The group was lost too often in a short time, so it is not restarted again."""

    text = "lost too often"


class RestartedByOperator(_GroupFailure, frozen=True):
    """An operator requested a restart."""

    text = "restarted by an operator"

    def __str__(self) -> str:
        return self.words


class Simulated(_GroupFailure, frozen=True):
    """A test or simulation removed the group."""

    text = "lost on purpose"


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
