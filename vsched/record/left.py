"""What an engine left behind when it was killed: the answers that it had begun, read from its record.

The newest segment alone is replayed: it begins with the state. In the end its kernel hears that all generate groups
are gone, as they are, and so knows the tokens of each answer, as it does when a group is lost while the engine lives.
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


class Begun(msgspec.Struct, frozen=True):
    """An answer that another engine began: the tokens that it had, to `prompt`, a digest of what is answered."""

    prompt: bytes
    token_ids: tuple[int, ...]

    def continued(self, request: Request) -> tuple[int, ...]:
        """Return the tokens for a prepared request, which must be the one that was being answered.

        Raises:
            RequestRefused: When its prompt or its images are others now.
        """
        if prompt_digest(request) != self.prompt:
            message = (
                "the prompt is not the one that was being answered before the server died: an image that is fetched, "
                "the chat template or the model changed meanwhile. Remedy: send the request again."
            )
            raise RequestRefused(message, code="prompt_changed", status=409)
        return self.token_ids


class Ended(msgspec.Struct, frozen=True):
    """An answer that had ended in an error, or because its client had left; `message` is empty where it had."""

    message: str
    code: str


class Left(msgspec.Struct, frozen=True):
    """What is known of requests, by their ids; `trouble` is why the record was not read to its end, mostly empty."""

    begun: dict[str, Begun]
    ended: dict[str, Ended]
    trouble: str = ""


def prompt_digest(request: Request) -> bytes:
    """Return 16 bytes that are equal for equal prompts with equal images."""
    digest = blake2b(digest_size=16, person=b"vsched.begun")
    for part in (request.prompt_token_ids, [(item.key, item.runs) for item in request.items]):
        digest.update(msgspec.msgpack.encode(part))
    return digest.digest()


def read_left(path: Path, request_ids: Collection[str]) -> Left:
    """Return what the record of an engine that is dead says of these requests; it never raises for what is recorded.

    Where the record cannot be read to its end, what it says before that is returned: tokens are known up to there.

    Blocks: for as long as the replay of a segment takes.
    """
    seen = _Seen(frozenset(request_ids))
    running = seen.replay = Replay(None, seen)
    trouble = ""
    try:
        report = running.run(find_segments(path)[-1:])
        if report.difference is not None:
            trouble = f"event {report.difference.number} is answered otherwise by this version"
    except RecordError as error:
        trouble = str(error)
    if running.kernel is not None:
        seen.end(running.kernel)
    return Left(seen.begun(), seen.ended, trouble)


class _Seen:
    """Follows the requests that are asked about through a replay."""

    replay: Replay

    def __init__(self, wanted: frozenset[str]) -> None:
        self._wanted = wanted
        self._states: dict[str, RequestState] = {}
        self._told: set[str] = set()
        self._now_ns = 0
        self.ended: dict[str, Ended] = {}

    def begin(self, header: SegmentHeader, config: Config) -> None:
        """Take in the requests that a segment begins with."""
        assert self.replay.kernel is not None
        self.take(self.replay.kernel)

    def take(self, kernel: Scheduler) -> None:
        """Take in the requests that a kernel has."""
        for state in kernel.requests:
            if state.request.request_id in self._wanted:
                self._states[state.request.request_id] = state

    def see(
        self, now_ns: int, event: Event, commands: Sequence[Command], kernel: Scheduler
    ) -> None:
        """Follow those that came and went."""
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
            self._told.add(finish.request_id)

    def end(self, kernel: Scheduler) -> None:
        """Have a kernel know the tokens that it keeps elsewhere while ranks run, for they run no more."""
        self.take(kernel)
        for group in kernel.generators:
            if group.ready:
                failure = ProcessExited((group.name,), 0, -_KILLED)
                kernel.handle(GroupLost(group.name, failure, planned=True), self._now_ns)

    def begun(self) -> dict[str, Begun]:
        """Return the answers that go on: of one that had ended, the last token brings the end once more."""
        return {
            name: Begun(prompt_digest(state.request), _outputs(state, ended=name in self._told))
            for name, state in self._states.items()
            if name not in self.ended
        }


def _outputs(state: RequestState, *, ended: bool) -> tuple[int, ...]:
    outputs = tuple(state.tokens[state.prompt_length :])
    return outputs[:-1] if ended else outputs
