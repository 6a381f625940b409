"""The answers that a killed engine had begun, read from its record.

Only the newest segment is replayed, since it begins with a snapshot, unless an upgrade changed the layout of snapshots:
then all are. Then the kernel gets the event that all generate
groups are lost, and adds the tokens of each answer to its request, as it does when a group is lost while serving.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

from vsched.config import Config
from vsched.errors import RecordError, RequestRefused
from vsched.failures import ProcessExited
from vsched.kernel import Scheduler
from vsched.kernel.commands import Accept, Command, Finish
from vsched.kernel.events import Event, GroupLost
from vsched.kernel.request import RequestState
from vsched.record.entries import SegmentHeader
from vsched.record.replay import Replay
from vsched.record.segments import find_segments
from vsched.types import FinishReason, Request

_KILLED = 9


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
    running, left = _read_segments(segments[-1:], request_ids)
    if running.kernel is None and len(segments) > 1:
        _, left = _read_segments(segments, request_ids)
    return left


def _read_segments(segments: Sequence[Path], request_ids: Collection[str]) -> tuple[Replay, Left]:
    seen = _Seen(frozenset(request_ids))
    running = seen.replay = Replay(None, seen)
    trouble = ""
    try:
        report = running.run(segments)
        if report.difference is not None:
            trouble = f"this version decides otherwise after event {report.difference.number}"
    except RecordError as error:
        trouble = str(error)
    if running.kernel is not None:
        seen.end(running.kernel)
    return running, Left(seen.started(), seen.ended, trouble)


class _Seen:
    """Follows requests through a replay."""

    replay: Replay

    def __init__(self, wanted: frozenset[str]) -> None:
        self._wanted = wanted
        self._states: dict[str, RequestState] = {}
        self._reported: set[str] = set()
        self._now_ns = 0
        self.ended: dict[str, Ended] = {}

    def begin(self, header: SegmentHeader, config: Config) -> None:
        """Add the requests of the snapshot."""
        assert self.replay.kernel is not None
        self.take(self.replay.kernel)

    def take(self, kernel: Scheduler) -> None:
        """Add the requests of a kernel."""
        for state in kernel.requests:
            if state.request.request_id in self._wanted:
                self._states[state.request.request_id] = state

    def see(
        self, now_ns: int, event: Event, commands: Sequence[Command], kernel: Scheduler
    ) -> None:
        """Note requests that are accepted or end."""
        self._now_ns = now_ns
        for command in commands:
            if isinstance(command, Accept) and command.request_id in self._wanted:
                self.take(kernel)
            elif isinstance(command, Finish) and command.request_id in self._wanted:
                self._finished(command)

    def _finished(self, finish: Finish) -> None:
        if finish.message or finish.reason in (FinishReason.ABORT, FinishReason.ERROR):
            self.ended[finish.request_id] = Ended(finish.message, finish.code)
        else:
            self._reported.add(finish.request_id)

    def end(self, kernel: Scheduler) -> None:
        """Report all generate groups as lost, so that the tokens of running requests are added to them."""
        self.take(kernel)
        for group in kernel.generators:
            if group.ready:
                failure = ProcessExited((group.name,), 0, -_KILLED)
                kernel.handle(GroupLost(group.name, failure, planned=True), self._now_ns)

    def started(self) -> dict[str, PartialOutput]:
        """Return the answers to resume. One that had ended lacks its last token, which will end it again."""
        return {
            name: PartialOutput(
                prompt_digest(state.request), _outputs(state, ended=name in self._reported)
            )
            for name, state in self._states.items()
            if name not in self.ended
        }


def _outputs(state: RequestState, *, ended: bool) -> tuple[int, ...]:
    outputs = tuple(state.tokens[state.prompt_length :])
    return outputs[:-1] if ended else outputs
