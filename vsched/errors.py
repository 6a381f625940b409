"""Errors that cross vsched's package boundaries.

Every message about a limit gives the value, the limit and a remedy, in the wording of `limit_message`.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator
from opcode import opname
from typing import Any, ClassVar, Self

from vsched.failures import ErrorKind, GroupFailure, RankStopped, StartFailed


def limit_message(what: str, *, value: object, limit: object, remedy: str) -> str:
    """Format an error message about a violated limit: subject, value, limit and remedy."""
    return f"{what}: value {value}, limit {limit}. Remedy: {remedy}."


def safe_text(value: object, convert: Callable[[Any], str] = repr) -> str:
    """Return a text for a message about a value whose own methods may raise anything, with surrogates escaped."""
    try:
        return convert(value).encode(errors="backslashreplace").decode()
    except BaseException as error:  # noqa: BLE001 - it is about a value of a user's class
        reraise_interrupt(error)
        return f"<a {type(value).__name__} that {convert.__name__}() failed for>"


def reraise_interrupt(error: BaseException) -> None:
    """Raise a KeyboardInterrupt of Ctrl-C again; one that a `raise` statement raised is an error as any other."""
    if not isinstance(error, KeyboardInterrupt):
        return
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code.co_code if trace is not None else b""
    if trace is None or opname[code[trace.tb_lasti]] != "RAISE_VARARGS":
        raise error


def described(error: BaseException) -> str:
    """Return the error of a user's code in words: its type, its text, and the file and the line that raised it."""
    text = f"{type(error).__name__}: {safe_text(error, str)}"
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) or not frames:  # a SyntaxError names its own
        return text
    return f"{text} ({frames[-1].filename}, line {frames[-1].lineno})"


def one_of(names: Iterable[str]) -> str:
    """Join names as a list of choices: `a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


class VschedError(Exception):
    """Base class of the errors that vsched raises on purpose; `kind` identifies the type in other processes."""

    kind: ClassVar[ErrorKind] = ErrorKind.INTERNAL

    @classmethod
    def of_limit(cls, what: str, *, value: object, limit: object, remedy: str, **more: Any) -> Self:
        """Return an error about a violated limit; `more` are further arguments of the class."""
        return cls(limit_message(what, value=value, limit=limit, remedy=remedy), **more)


class ConfigError(VschedError):
    """A configuration that cannot be loaded; each line of the message starts with the path of a key."""

    kind = ErrorKind.CONFIG


class PolicyError(VschedError):
    """A policy class that does not meet its contract, found at registration."""

    kind = ErrorKind.POLICY


class ConfigProblems:
    """Collects configuration errors, so that all of them are reported at once."""

    def __init__(self) -> None:
        self._found: list[ConfigError | PolicyError] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, message: str) -> None:
        """Add an error."""
        self._found.append(ConfigError(message))

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Collect an error that the body raises, and continue after it."""
        try:
            yield
        except (ConfigError, PolicyError) as error:
            self._found.append(error)

    def raise_all(self) -> None:
        """Raise the collected errors, if any.

        Raises:
            ConfigError: All errors, one per line; a single error is raised unchanged.
            PolicyError: If it is the only error.
        """
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise ConfigError("\n".join(map(str, self._found)))


class CheckpointError(VschedError):
    """A checkpoint that is missing, unsupported, incomplete or corrupt."""

    kind = ErrorKind.CHECKPOINT


class RecordError(VschedError):
    """A decision record that cannot be written or read."""


class RequestRefused(VschedError):
    """A request that is rejected before any work is done for it.

    Attributes:
        code: Machine-readable reason, such as `context_exceeded` or `queue_full`.
        status: HTTP status: 400 for a client error, 413, 429 or 503 for a server limit, 307 for a redirect.
        retry_after_s: With 429 and 503, the delay after which a retry makes sense.
        location: With 307, the base URL of the server to use instead.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        status: int = 400,
        retry_after_s: int | None = None,
        location: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.retry_after_s = retry_after_s
        self.location = location


class RequestFailed(VschedError):
    """An accepted request that ended in an error; the message is safe to show to the client.

    `retry_after_s` is set with status 503, when a retry makes sense.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "internal_error",
        status: int = 500,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.retry_after_s = retry_after_s


class DeviceOutOfMemory(VschedError):
    """A device is out of memory; the only type for this at every level from the allocator to the policy.

    `summary` is the message without the remedy, for callers that know a better one.
    """

    kind = ErrorKind.OUT_OF_MEMORY

    def __init__(self, summary: str = "", *, remedy: str = "") -> None:
        super().__init__(f"{summary}. Remedy: {remedy}." if remedy else summary)
        self.summary = summary


class MemoryLeak(VschedError):
    """A teardown did not return all of its memory."""

    kind = ErrorKind.MEMORY_LEAK


class RankDesync(VschedError):
    """A rank found a gap or a different digest in its decision log and stopped."""

    kind = ErrorKind.DESYNC


class GroupLostError(VschedError):
    """A group of ranks is gone: a process exited, a deadline passed, or a rank diverged."""

    kind = ErrorKind.GROUP_LOST


class PeerLost(GroupLostError):
    """A rank lost the connection to a peer of its group; the peer's own error is more specific."""

    kind = ErrorKind.PEER_LOST


class StartFailedError(GroupLostError):
    """A worker group could not start; `failure` says why."""

    def __init__(self, failure: GroupFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


_AT_START = (CheckpointError, ConfigError, DeviceOutOfMemory, PolicyError)


def error_kind(error: BaseException) -> ErrorKind:
    """Kind that identifies an error in other processes."""
    return error.kind if isinstance(error, VschedError) else ErrorKind.INTERNAL


def failure_of(error: Exception, groups: tuple[str, ...]) -> GroupFailure:
    """Convert an exception from a worker group's start to a failure value."""
    if isinstance(error, StartFailedError):
        return error.failure
    return StartFailed(groups, error_kind(error), str(error))


def startup_error(failure: GroupFailure) -> VschedError:
    """Exception for a worker group that could not start: the rank's own error if the user can fix it."""
    if isinstance(failure, RankStopped):
        for error in _AT_START:
            if error.kind is failure.kind:
                return error(failure.message)
    return StartFailedError(failure)
