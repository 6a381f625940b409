"""Recording: writes every event of the scheduler, and its decisions, while it serves.

The recorder runs on the event loop after each event, and takes microseconds. Each entry is written at once: writing
some hundred bytes into the page cache takes about 1 µs, and the entry survives the process. Nothing is synced, so a
power failure may lose the end of a record.

Recording never stops serving: any error after the start is logged once, and ends the record.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from vsched.config import Config
from vsched.config.policies import resolve_policies
from vsched.errors import ConfigError, RecordError
from vsched.kernel import Scheduler
from vsched.kernel.commands import Command
from vsched.kernel.events import Event
from vsched.policy_host.snapshot import LAYOUT, encode_snapshot
from vsched.record.entries import SegmentHeader, encode_entry
from vsched.record.files import FORMAT, VERSION, complete_segments, frame, numbered, set_aside

logger = logging.getLogger(__name__)
MODE = 0o600
"""Only the owner may read a record: it has the prompts of clients, as tokens."""


def open_recorder(config: Config, kernel: Scheduler) -> Recorder | None:
    """Begin a record of a scheduler that has not handled an event yet; None if `record.path` is empty.

    An earlier record of the same name is renamed to `….previous`. If the state of a user's policy cannot be recorded,
    this is logged, and nothing is recorded.

    Raises:
        ConfigError: If the path cannot be written, or another process records there.
    """
    if not config.record.path:
        return None
    path = Path(config.record.path)
    try:
        return Recorder(path, config, kernel)
    except OSError as error:
        raise _unwritable(path, str(error.strerror)) from error
    except RecordError as error:
        logger.warning("nothing is recorded: %s", error)
        return None


def check_record_path(config: Config) -> None:
    """Check that a record could begin, without writing anything: before models are loaded.

    Raises:
        ConfigError: As from `open_recorder`.
    """
    if not config.record.path:
        return
    path = Path(config.record.path)
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise _unwritable(path, "it is a folder, or its folder does not exist or is not writable")
    with suppress(OSError):  # which opening the record reports
        _check_alone(path)


def _unwritable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"record.path: {path}: cannot be written: {reason}. Remedy: name a file in a writable folder, or none"
    )


class Recorder:
    """Writes a record, one segment after another, and keeps the newest segments."""

    def __init__(self, path: Path, config: Config, kernel: Scheduler) -> None:
        """Begin a record, like `open_recorder`, but with bare errors."""
        self._path = path
        self._kernel = kernel
        self._limits = config.record
        policies = resolve_policies(config).by_table
        self._about: dict[str, Any] = {
            "run": os.urandom(8),
            "version": version("vsched"),
            "config": msgspec.to_builtins(config),
            "limits": msgspec.to_builtins(kernel.limits),
            "policies": {table: repr(policy) for table, policy in policies.items()},
        }
        self._number = 0
        self._segment = 0
        self._fd = -1
        self._written = 0
        self._segment_bytes = 0
        _check_alone(path)
        self._begin_segment()

    def record_event(self, event: Event, now_ns: int, commands: Sequence[Command]) -> None:
        """Write an event and its commands; call it before the scheduler handles the next event.

        It never raises: an error is logged once, and ends the record.
        """
        if self._fd < 0:
            return
        try:
            entry = frame(encode_entry(self._number, now_ns, event, commands))
            write_all(self._fd, entry)  # readers drop an incomplete entry
            self._number += 1
            self._written += len(entry)
            if self._written >= self._segment_bytes:
                self._begin_segment()
        except OSError as error:
            self._give_up(f"{self._path}: {error.strerror or error}")
        except Exception as error:  # noqa: BLE001 - a record is never worth the requests
            self._give_up(f"{self._path}: {error or type(error).__name__}")

    def close(self) -> None:
        """End the record."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _give_up(self, reason: str) -> None:
        logger.error("the record ends after %d events, serving goes on: %s", self._number, reason)
        self.close()

    def _begin_segment(self) -> None:
        """Write a new segment that begins with a snapshot, then rename it to the name of the record."""
        header = SegmentHeader(
            segment=self._segment + 1,
            started_s=time.time(),
            number=self._number,
            state=encode_snapshot(self._kernel),
            layout=LAYOUT,
            **self._about,
        )
        start = FORMAT + VERSION + frame(msgspec.msgpack.encode(header))
        fresh = self._path.with_name(f"{self._path.name}.new")
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_all(fd, start)
            if self._segment:
                self._path.rename(numbered(self._path, self._segment))
            else:
                set_aside(self._path)
            fresh.rename(self._path)
        except BaseException:
            os.close(fd)
            fresh.unlink(missing_ok=True)
            raise
        self.close()
        self._fd = fd
        self._segment += 1
        self._written = 0
        # A snapshot that is larger than a segment must not be written after every event.
        self._segment_bytes = max(self._limits.segment_bytes - len(start), len(start))
        for old in complete_segments(self._path)[: 1 - self._limits.segments]:
            old.unlink(missing_ok=True)


def write_all(fd: int, data: bytes) -> None:
    """Write all data, in several writes if necessary.

    Raises:
        OSError: If it cannot be written, as on a full disk.
    """
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def _check_alone(path: Path) -> None:
    """Check that no other process writes this record."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"record.path: {path}: another server records here. Remedy: name another file"
        ) from None
    finally:
        os.close(fd)
