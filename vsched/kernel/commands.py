"""What the kernel wants done."""

from __future__ import annotations

import enum

import msgspec

from vsched.kernel.decisions import Decision
from vsched.types import FinishReason


class Decide(msgspec.Struct, frozen=True):
    """Append a decision to a group's log."""

    group: str
    decision: Decision


class Enter(msgspec.Struct, frozen=True):
    """A request at the front door comes in: prepare and submit it."""

    knock: int


class TurnAway(msgspec.Struct, frozen=True):
    """A request at the front door does not come in.

    Attributes:
        reason: Why, in a clause; empty where it is sent elsewhere.
        status: 429 or 503.
        retry_after_s: When it may try again.
        base_url: Where the client is to go; empty for nowhere.
    """

    knock: int
    reason: str = ""
    status: int = 429
    retry_after_s: int = 1
    base_url: str = ""


class Accept(msgspec.Struct, frozen=True):
    """A request is in; ranks and token batches know it by `number`."""

    request_id: str
    number: int


class RefusalCode(enum.StrEnum):
    """Why a request is refused; the codes are those that clients see."""

    EMPTY = "empty"
    """`value` prompt tokens and `detail[0]` outputs; one of them is below `limit`."""
    BAD_ITEMS = "bad_items"
    """Items that overlap, hold no tokens, or lie outside the prompt of `limit` tokens; `detail` has their spans."""
    CONTEXT_EXCEEDED = "context_exceeded"
    """Tokens of prompt and output."""
    KV_EXCEEDED = "kv_exceeded"
    """Tokens of prompt and output that even an empty KV cache cannot hold."""
    IMAGE_EXCEEDS_CACHE = "image_exceeds_cache"
    """Tokens of one image that even an empty embedding cache cannot hold."""
    IMAGES_EXCEED_CACHE = "images_exceed_cache"
    """Tokens of all images of a request, in whole pages of `detail[0]`."""
    CHUNK_EXCEEDED = "chunk_exceeded"
    """Tokens that see each other, and that one step must therefore hold, beside a decode of each slot."""
    QUEUE_FULL = "queue_full"
    """Requests that wait, or bytes that they hold: `setting` tells which. It may pass later."""
    DUPLICATE_ID = "duplicate_id"
    """A live request has this id."""
    GIVEN_UP = "given_up"
    """No group is left, nor will be, to serve it: `reason` tells why."""


class Refuse(msgspec.Struct, frozen=True):
    """A request is refused; nothing of it was kept. These are the facts: `vsched.aio.refusals` words them.

    Attributes:
        value: What the request has, or would bring it to.
        limit: What is allowed.
        setting: The key of the configuration that sets the limit; empty where none does.
        detail: More numbers; see the code.
        reason: Why no request is served any more, in words of the group that was lost last.
    """

    request_id: str
    code: RefusalCode
    value: int = 0
    limit: int = 0
    setting: str = ""
    detail: tuple[int, ...] = ()
    reason: str = ""


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
    Decide
    | Enter
    | TurnAway
    | Accept
    | Refuse
    | EmitTokens
    | Finish
    | SetTimer
    | RestartGroup
    | Drained
    | Notice
)
