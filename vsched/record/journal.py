"""The HTTP requests that are being answered, for an engine that resumes them after this one was killed.

A record has the tokens of prompts and answers, but no pixels and no response format. Both follow from the body of the
HTTP request, which is kept in a file from before the request is accepted until its response has been sent. One file a
request needs no compaction, and damage affects one request. As with the record, a file survives the process, but is not
synced, so a power failure may lose it.

The next engine reads the tokens from the record. Only the newest segment is replayed, since it begins with a snapshot,
unless an upgrade changed the layout of snapshots: then all are. Then the kernel gets the event that all generate groups
are lost, and adds the tokens of each answer to its request, as it does when a group is lost while serving.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

from vsched.config import Config
from vsched.errors import ConfigError, RecordError, RequestRefused
from vsched.failures import ProcessExited
from vsched.kernel import Scheduler
from vsched.kernel.commands import Accept, Command, Finish
from vsched.kernel.events import Event, GroupLost
from vsched.kernel.request import RequestState
from vsched.record.files import FORMAT, VERSION, FrameReader, find_segments, frame
from vsched.record.recorder import MODE, write_all
from vsched.record.replay import Replay
from vsched.types import FinishReason, Request

logger = logging.getLogger(__name__)
_SUFFIX = ".request"
_KILLED = 9
SERVER_ENDED = ("stopping", "given_up")
"""Codes of errors that end requests because their server ends; the next one continues them."""


class PartialOutput(msgspec.Struct, frozen=True):
    """An answer that another engine began: the digest of its prompt, and its tokens."""

    prompt: bytes
    token_ids: tuple[int, ...]

    def continued(self, request: Request) -> tuple[int, ...]:
        """Return the tokens, for the same request prepared again.

        Raises:
            RequestRefused: If its prompt or its images have changed.
        """
        if prompt_digest(request) != self.prompt:
            message = (
                "the prompt is not the one that was answered before the server died: a fetched image, the chat "
                "template or the model changed meanwhile. Remedy: send the request again."
            )
            raise RequestRefused(message, code="prompt_changed", status=409)
        return self.token_ids


class Ended(msgspec.Struct, frozen=True):
    """An answer that ended in an error, or, with an empty `message`, because its client left."""

    message: str
    code: str


class Left(msgspec.Struct, frozen=True):
    """Begun and ended answers by request id.

    Attributes:
        trouble: Why the record could not be read to its end; empty if it could.
    """

    started: dict[str, PartialOutput]
    ended: dict[str, Ended]
    trouble: str = ""


def prompt_digest(request: Request) -> bytes:
    """Return a digest of a prompt and its images, 16 bytes."""
    digest = blake2b(digest_size=16, person=b"vsched.begun")
    items = [(item.key, item.runs, *item.kept) for item in request.items]
    for part in (request.prompt_token_ids, items):
        digest.update(msgspec.msgpack.encode(part))
    return digest.digest()


def read_left(path: Path, request_ids: Collection[str]) -> Left:
    """Return what the record of a dead engine has about these requests.

    If the record cannot be read to its end, the tokens before the damage are returned; nothing is raised.

    Blocks: while a segment is replayed, or all, if an upgrade changed the layout of snapshots.
    """
    try:
        segments = find_segments(path)
    except RecordError as error:
        return Left({}, {}, str(error))
    seen = _Seen(frozenset(request_ids))
    trouble = seen.replay(segments[-1:])
    if seen.kernel is None and len(segments) > 1:
        trouble = seen.replay(segments)
    return Left(seen.started(), seen.ended, trouble)


class _Seen:
    """Follows requests through a replay."""

    def __init__(self, wanted: frozenset[str]) -> None:
        self.kernel: Scheduler | None = None
        self.ended: dict[str, Ended] = {}
        self._wanted = wanted
        self._states: dict[str, RequestState] = {}
        self._reported: set[str] = set()
        self._now_ns = 0

    def replay(self, segments: Sequence[Path]) -> str:
        """Replay segments as far as possible; return why they could not be replayed to their end, empty if they could.

        At the end all generate groups are lost, so that the tokens of running requests are added to them.
        """
        trouble = ""
        try:
            report = Replay(None, self).run(segments)
            if report.difference is not None:
                trouble = f"this version decides otherwise after event {report.difference.number}"
        except RecordError as error:
            trouble = str(error)
        if self.kernel is not None:
            self._add_wanted(self.kernel)
            for group in self.kernel.generators:
                if group.ready:
                    failure = ProcessExited((group.name,), 0, -_KILLED)
                    self.kernel.handle(GroupLost(group.name, failure, planned=True), self._now_ns)
        return trouble

    def see_start(self, config: Config, kernel: Scheduler) -> None:
        """Add the requests of the snapshot."""
        self._add_wanted(kernel)

    def _add_wanted(self, kernel: Scheduler) -> None:
        self.kernel = kernel
        for state in kernel.requests:
            if state.request.request_id in self._wanted:
                self._states[state.request.request_id] = state

    def see(
        self, now_ns: int, event: Event, commands: Sequence[Command], kernel: Scheduler
    ) -> None:
        """Note requests that are accepted or end."""
        self.kernel, self._now_ns = kernel, now_ns
        for command in commands:
            match command:
                case Accept(request_id=name) if name in self._wanted:
                    self._add_wanted(kernel)
                case Finish(request_id=name, reason=reason) if (
                    name in self._wanted and command.code not in SERVER_ENDED
                ):
                    if command.message or reason in (FinishReason.ABORT, FinishReason.ERROR):
                        self.ended[name] = Ended(command.message, command.code)
                    else:
                        self._reported.add(name)

    def started(self) -> dict[str, PartialOutput]:
        """Return the answers to resume. One that had ended lacks its last token, which will end it again."""
        found = {}
        for name, state in self._states.items():
            if name not in self.ended:
                outputs = tuple(state.tokens[state.prompt_length :])
                outputs = outputs[:-1] if name in self._reported else outputs
                found[name] = PartialOutput(prompt_digest(state.request), outputs)
        return found


class KeptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An accepted request.

    Attributes:
        given_id: The id from the client; empty for none.
        path: The path of its URL.
        created: Its arrival, seconds since 1970; repeated in the response.
        seed: The seed of its first choice, drawn if the client sent none.
        answers: Its number of choices, over all its prompts.
        body: The body of the HTTP request.
    """

    request_id: str
    given_id: str = ""
    path: str
    tenant: str = ""
    created: int
    seed: int
    choices: int = 1
    body: bytes


class ResumeProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How often a request was resumed without an end, and the answer that the next engine resumes."""

    resumed: int = 0
    started: PartialOutput | None = None


class LeftRequest(msgspec.Struct, frozen=True):
    """A request of a killed engine, and the state of its answer."""

    request: KeptRequest
    progress: ResumeProgress


def folder_of(record: Path) -> Path:
    """Return the folder for the requests of a record."""
    return record.with_name(f"{record.name}.requests")


def open_journal(config: Config) -> RequestJournal | None:
    """Return the configured journal; None if `record.resume` is off.

    Raises:
        ConfigError: If nothing is recorded, or the folder cannot be used.
    """
    if not config.record.resume:
        return None
    if not config.record.path:
        raise ConfigError(
            "record.resume: the tokens of answers come from a record, and none is written. "
            "Remedy: set record.path (--record FILE), or unset record.resume"
        )
    if config.server.processes > 1:
        raise ConfigError.of_limit(
            "record.resume: only a server with one process can keep requests",
            value=f"server.processes = {config.server.processes}",
            limit=1,
            remedy="set server.processes = 1, or unset record.resume",
        )
    folder = folder_of(Path(config.record.path))
    try:
        return RequestJournal(folder, bytes_max=config.record.resume_bytes)
    except OSError as error:
        raise ConfigError(
            f"record.resume: {folder}: cannot be used: {error.strerror}. Remedy: name a record in a writable folder, "
            "or move that file away"
        ) from error


class RequestJournal:
    """Keeps requests in a folder, up to a limit of bytes; thread-safe."""

    def __init__(self, folder: Path, *, bytes_max: int) -> None:
        """Open the folder; its files are read by `left`.

        Raises:
            OSError: If it cannot be created, listed or written.
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

    def keep_request(self, request: KeptRequest) -> bool:
        """Keep a request until `delete_request`; return False if the limit is reached or the disk is full.

        Blocks: for a write into the page cache.
        """
        data = FORMAT + VERSION + frame(msgspec.msgpack.encode(request))
        with self._lock:
            if self._bytes + len(data) > self._bytes_max:
                return False
            self._made += 1
            # Names are unique across processes, and sort by age.
            path = self._folder / f"{time.time_ns():020d}-{os.getpid()}-{self._made}{_SUFFIX}"
            self._files[request.request_id] = path, len(data)
            self._bytes += len(data)
        try:
            _write(path, data, os.O_CREAT | os.O_EXCL)
        except OSError as error:
            if not self._complained:
                self._complained = True
                reason = f"{path}: {error.strerror}"
                logger.error("requests are served, but not kept for another engine: %s", reason)  # noqa: TRY400
            self.delete_request(request.request_id)
            return False
        if request.request_id not in self._files:  # its client left meanwhile
            path.unlink(missing_ok=True)
            return False
        return True

    def delete_request(self, request_id: str) -> None:
        """Delete a request, if it was kept."""
        with self._lock:
            path, size = self._files.pop(request_id, (None, 0))
            self._bytes -= size
        if path is not None:
            path.unlink(missing_ok=True)

    def append_progress(self, request_id: str, progress: ResumeProgress) -> None:
        """Append the progress of a resumed request to its file.

        Raises:
            OSError: If it cannot be written.
        """
        path, _ = self._files[request_id]
        size = path.stat().st_size
        try:
            _write(path, frame(msgspec.msgpack.encode(progress)), os.O_APPEND)
        except OSError:
            os.truncate(path, size)  # a later note must not follow a part of this one
            raise

    def left(self) -> Iterator[LeftRequest]:
        """Yield the requests of the engine before, oldest first, and keep them.

        An incomplete file is deleted: its request was not accepted yet. An unreadable file is logged and deleted.
        """
        found, self._found = self._found, []
        for path in found:
            try:
                one = _read(path)
                size = path.stat().st_size
            except (RecordError, OSError, msgspec.MsgspecError) as error:
                logger.error("a request of the engine before cannot be resumed: %s", error)  # noqa: TRY400 - the message suffices
                one = None
            if one is None:
                path.unlink(missing_ok=True)
                continue
            with self._lock:
                self._files[one.request.request_id] = path, size
                self._bytes += size
            yield one


def _read(path: Path) -> LeftRequest | None:
    """Return the request of a file; None if the file is incomplete."""
    reader = FrameReader(path, newest=True)
    bodies = [body for _, body in reader.bodies()]
    if not bodies:
        logger.warning("%s: no complete request: the server died while it was written", path)
        return None
    if (
        reader.dropped_bytes
    ):  # the server died while it noted its progress: the next note must not follow that
        os.truncate(path, path.stat().st_size - reader.dropped_bytes)
    request = msgspec.msgpack.decode(bodies[0], type=KeptRequest)
    progress = ResumeProgress()
    if bodies[1:]:
        progress = msgspec.msgpack.decode(bodies[-1], type=ResumeProgress)
    return LeftRequest(request, progress)


def _write(path: Path, data: bytes, flags: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, MODE)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)
