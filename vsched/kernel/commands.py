"""What the kernel wants done."""

from __future__ import annotations

import msgspec

from vsched.kernel.decisions import Decision
from vsched.types import FinishReason


class Decide(msgspec.Struct, frozen=True):
    """Append a decision to a group's log."""

    group: str
    decision: Decision


class Accept(msgspec.Struct, frozen=True):
    """A request is in; ranks and token batches know it by `number`."""

    request_id: str
    number: int


class Refuse(msgspec.Struct, frozen=True):
    """A request is refused; nothing of it was kept."""

    request_id: str
    code: str
    status: int
    message: str
    retry_after_s: int | None = None


class RequestTimes(msgspec.Struct, frozen=True):
    """When a request passed its stations, in kernel nanoseconds; 0 where it never did."""

    submitted_ns: int = 0
    items_ready_ns: int = 0
    admitted_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
    cached_tokens: int = 0
    encoded_items: int = 0
    preemptions: int = 0


class EmitTokens(msgspec.Struct, frozen=True):
    """Hand the tokens of this step to their streams (the shell holds the rank's batch itself)."""

    step: int


class Finish(msgspec.Struct, frozen=True):
    """The one terminal reply of an accepted request."""

    request_id: str
    number: int
    reason: FinishReason
    times: RequestTimes
    message: str = ""
    code: str = ""


class SetTimer(msgspec.Struct, frozen=True):
    """Send `TimerFired` at this time."""

    deadline_ns: int


class RestartGroup(msgspec.Struct, frozen=True):
    """Start a lost group anew."""

    group: str


class Drained(msgspec.Struct, frozen=True):
    """A draining group has nothing to do any more; it may be stopped, restarted or resumed."""

    group: str


class Notice(msgspec.Struct, frozen=True):
    """Something an operator should read, such as a policy that raised."""

    message: str


Command = (
    Decide | Accept | Refuse | EmitTokens | Finish | SetTimer | RestartGroup | Drained | Notice
)
