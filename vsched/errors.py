"""Every error that crosses a vsched boundary.

A message that speaks of a limit always gives the value, the limit and the remedy: `limit_message` words it, so that
every such message in the project reads alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import ClassVar

from vsched.failures import ErrorKind, GroupFailure, RankStopped, StartFailed


def limit_message(what: str, *, value: object, limit: object, remedy: str) -> str:
    """Word a violated limit: what happened, the value, the limit, the remedy."""
    return f"{what}: value {value}, limit {limit}. Remedy: {remedy}."


def one_of(names: Iterable[str]) -> str:
    """Return the names as a choice: `a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


class VschedError(Exception):
    """The base of all errors that vsched raises on purpose; `kind` is what tells of one in another process."""

    kind: ClassVar[ErrorKind] = ErrorKind.INTERNAL


class ConfigError(VschedError):
    """A configuration that cannot be loaded; each line of the message starts with the path of a key."""

    kind = ErrorKind.CONFIG


class PolicyError(VschedError):
    """A policy class that does not meet its contract, found at registration."""

    kind = ErrorKind.POLICY


class ConfigProblems:
    """Collects what is wrong with a configuration, so that all of it is told at once."""

    def __init__(self) -> None:
        self._found: list[ConfigError | PolicyError] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, message: str) -> None:
        """Note a problem."""
        self._found.append(ConfigError(message))

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Note what the body raises, and go on behind it."""
        try:
            yield
        except (ConfigError, PolicyError) as error:
            self._found.append(error)

    def tell(self) -> None:
        """Raise what was found, if anything was.

        Raises:
            ConfigError: All of it, a problem a line; a single problem is raised as it is.
            PolicyError: When it is the only problem.
        """
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise ConfigError("\n".join(map(str, self._found)))


class CheckpointError(VschedError):
    """A checkpoint that is missing, unsupported, incomplete or corrupt."""

    kind = ErrorKind.CHECKPOINT


class RecordError(VschedError):
    """A record of the scheduler's decisions that cannot be written or read."""


class RequestRefused(VschedError):
    """A request that is refused before any work is done for it.

    Attributes:
        code: A short machine-readable reason, such as `context_exceeded` or `queue_full`.
        status: The HTTP status that fits: 400 for the client's mistake, 413, 429 or 503 for ours, 307 for a redirect.
        retry_after_s: For 429 and 503, when trying again makes sense.
        location: For 307, the base URL of the server to ask instead.
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
    """An accepted request that ended in an error; its message is safe to show to the client.

    `retry_after_s` is given with a status of 503: trying again makes sense.
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
    """Memory ran out on a device; the one type for this from the allocator up to the policy."""

    kind = ErrorKind.OUT_OF_MEMORY


class MemoryLeak(VschedError):
    """Memory that a teardown should have returned did not come back."""

    kind = ErrorKind.MEMORY_LEAK


class RankDesync(VschedError):
    """A rank saw a gap or a different digest in its decision log and stopped."""

    kind = ErrorKind.DESYNC


class GroupLostError(VschedError):
    """A group of ranks is gone: a process exited, a deadline passed, or a rank diverged."""

    kind = ErrorKind.GROUP_LOST


class PeerLost(GroupLostError):
    """A rank misses another one of its group; that one's own word tells more."""

    kind = ErrorKind.PEER_LOST


class StartFailedError(GroupLostError):
    """A worker group could not start; `failure` says why."""

    def __init__(self, failure: GroupFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


_AT_START = (CheckpointError, ConfigError, DeviceOutOfMemory, PolicyError)


def error_kind(error: BaseException) -> ErrorKind:
    """Return the kind by which another process knows an error."""
    return error.kind if isinstance(error, VschedError) else ErrorKind.INTERNAL


def failure_of(error: Exception, groups: tuple[str, ...]) -> GroupFailure:
    """Return why a worker group could not start, from what its start raised."""
    if isinstance(error, StartFailedError):
        return error.failure
    return StartFailed(groups, error_kind(error), str(error))


def startup_error(failure: GroupFailure) -> VschedError:
    """Return the exception for a worker group that could not start: the rank's own where its user can mend it."""
    if isinstance(failure, RankStopped):
        for error in _AT_START:
            if error.kind is failure.kind:
                return error(failure.message)
    return StartFailedError(failure)
