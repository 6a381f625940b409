"""The requests that are being answered, as they were sent: what an engine needs to go on after the death of this one.

A record has the tokens of prompts and answers, but neither how an answer is to be worded nor pixels. Both follow from
what the client sent, so that is kept: its body, in a file of its own, from before the request is accepted until its
answer was told. A file for each, so that nothing has to be compacted, and damage to one is damage to one. As with the
record, each file is written at once and survives the process however that ends; nothing is synced, so a power cut may
take it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from vsched.config import Config
from vsched.errors import ConfigError, RecordError, limit_message
from vsched.record.frames import FORMAT, VERSION, FrameReader, frame
from vsched.record.left import Begun
from vsched.record.recorder import MODE, write_all

logger = logging.getLogger(__name__)
_SUFFIX = ".request"


class KeptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it was accepted.

    Attributes:
        given_id: The id that its client gave it; empty for none.
        path: Where it was sent.
        created: When it came, seconds since 1970, which its answer repeats.
        seed: That of its first answer, drawn where the client sent none.
        answers: How many it has, over all its prompts.
        body: What was sent.
    """

    request_id: str
    given_id: str = ""
    path: str
    tenant: str = ""
    created: int
    seed: int
    answers: int = 1
    body: bytes


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine that goes on with a request begins with; it was resumed so often before."""

    resumed: int = 0
    begun: Begun | None = None


class LeftRequest(msgspec.Struct, frozen=True):
    """A request that an engine left, and what is known of its answer."""

    request: KeptRequest
    progress: Progress


def folder_of(record: Path) -> Path:
    """Return the folder for the requests of a record."""
    return record.with_name(f"{record.name}.requests")


def open_journal(config: Config) -> RequestJournal | None:
    """Return the journal that a configuration asks for; None for none.

    Raises:
        ConfigError: When there is no record beside it, or its folder cannot be used.
    """
    if not config.record.resume:
        return None
    if not config.record.path:
        raise ConfigError(
            "record.resume: an engine goes on behind the tokens that its record has, and none is written. "
            "Remedy: set record.path (--record FILE), or leave record.resume away"
        )
    if config.server.processes > 1:
        raise ConfigError(
            limit_message(
                "record.resume: requests are kept by the engine's process, which serves HTTP alone then",
                value=f"server.processes = {config.server.processes}",
                limit=1,
                remedy="set server.processes = 1, or leave record.resume away",
            )
        )
    folder = folder_of(Path(config.record.path))
    try:
        return RequestJournal(folder, bytes_max=config.record.resume_bytes)
    except OSError as error:
        raise ConfigError(
            f"record.resume: {folder}: cannot be used: {error.strerror}. Remedy: name a record in a folder that may be "
            "written, or move what has that name away"
        ) from error


class RequestJournal:
    """Keeps requests in a folder, up to a number of bytes together; safe to be called from several threads."""

    def __init__(self, folder: Path, *, bytes_max: int) -> None:
        """Begin with what is in the folder.

        Raises:
            OSError: When it cannot be made, listed or written.
        """
        self._folder = folder
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._files: dict[str, tuple[Path, int]] = {}
        self._bytes = 0
        self._made = 0
        self._complained = False
        folder.mkdir(mode=0o700, exist_ok=True)
        self._found = sorted(one for one in folder.iterdir() if one.suffix == _SUFFIX)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, os.strerror(13))

    def keep(self, request: KeptRequest) -> bool:
        """Keep a request until `end`; return whether it is: there may be no room, on the disk or within the limit.

        Blocks: for a write of its bytes into the system's cache.
        """
        data = FORMAT + VERSION + frame(msgspec.msgpack.encode(request))
        with self._lock:
            if self._bytes + len(data) > self._bytes_max:
                return False
            self._made += 1
            # Of several processes with one folder, each makes names of its own; in order they are as old as requests.
            path = self._folder / f"{time.time_ns():020d}-{os.getpid()}-{self._made}{_SUFFIX}"
            self._files[request.request_id] = path, len(data)
            self._bytes += len(data)
        try:
            _write(path, data, os.O_CREAT | os.O_EXCL)
        except OSError as error:
            self._complain(f"{path}: {error.strerror}")
            self.end(request.request_id)
            return False
        if request.request_id not in self._files:  # its client left meanwhile
            path.unlink(missing_ok=True)
            return False
        return True

    def end(self, request_id: str) -> None:
        """Forget a request, if it was kept: its answer was told, or its client has left."""
        with self._lock:
            path, size = self._files.pop(request_id, (None, 0))
            self._bytes -= size
        if path is not None:
            path.unlink(missing_ok=True)

    def note(self, request_id: str, progress: Progress) -> None:
        """Keep, with a request that was left, what the next engine begins with.

        Raises:
            OSError: When it cannot be written.
        """
        path, _ = self._files[request_id]
        _write(path, frame(msgspec.msgpack.encode(progress)), os.O_APPEND)

    def left(self) -> Iterator[LeftRequest]:
        """Yield the requests that were in the folder at the beginning, oldest first, and keep them.

        A file that is not whole is one whose request was about to be accepted: nobody waits for it. It is removed, and
        so is one that cannot be read, which is logged.
        """
        found, self._found = self._found, []
        for path in found:
            try:
                one = _read(path)
                size = path.stat().st_size
            except (RecordError, OSError, msgspec.MsgspecError) as error:
                logger.error("a request that was left cannot be resumed: %s", error)  # noqa: TRY400 - it says it all
                one = None
            if one is None:
                path.unlink(missing_ok=True)
                continue
            with self._lock:
                self._files[one.request.request_id] = path, size
                self._bytes += size
            yield one

    def _complain(self, reason: str) -> None:
        if not self._complained:
            self._complained = True
            logger.error("requests are served, and not kept for another engine: %s", reason)


def _read(path: Path) -> LeftRequest | None:
    """Return the request of a file; None where it was never written whole."""
    bodies = [body for _, body in FrameReader(path, newest=True).bodies()]
    if not bodies:
        logger.warning("%s: no whole request: the server died while it was written", path)
        return None
    request = msgspec.msgpack.decode(bodies[0], type=KeptRequest)
    progress = Progress()
    if bodies[1:]:
        progress = msgspec.msgpack.decode(bodies[-1], type=Progress)
    return LeftRequest(request, progress)


def _write(path: Path, data: bytes, flags: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, MODE)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)
