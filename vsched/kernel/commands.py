"""Commands: the output of the scheduler."""

from __future__ import annotations

import enum

import msgspec

from vsched.kernel.decisions import Decision
from vsched.types import FinishReason

_ARRIVAL_ID: int = msgspec.field(name="knock")
"""Encoded by an earlier name, so that digests of simulations can be compared across versions."""


class Decide(msgspec.Struct, frozen=True):
    """Append a decision to a group's log."""

    group: str
    decision: Decision


class AdmitArrival(msgspec.Struct, frozen=True):
    """Prepare an arrived request, and submit it."""

    arrival_id: int = _ARRIVAL_ID


class RejectArrival(msgspec.Struct, frozen=True):
    """Reject an arrived request.

    Attributes:
        reason: A clause for the client; empty for a redirect.
        status: 429 or 503.
        retry_after_s: Seconds after which the client may retry.
        base_url: The server to redirect to; empty for none.
    """

    arrival_id: int = _ARRIVAL_ID
    reason: str = ""
    status: int = 429
    retry_after_s: int = 1
    base_url: str = ""


class Accept(msgspec.Struct, frozen=True):
    """A request is accepted; ranks and token batches refer to it by `number`."""

    request_id: str
    number: int


class RefusalCode(enum.StrEnum):
    """Why a request is refused; clients see the codes."""

    EMPTY = "empty"
    """There are `value` prompt tokens and `detail[0]` outputs, of which one is below `limit`."""
    BAD_ITEMS = "bad_items"
    """Items overlap, have no tokens, or lie outside the prompt of `limit` tokens; `detail` has their spans."""
    CONTEXT_EXCEEDED = "context_exceeded"
    """Prompt and output have too many tokens."""
    KV_EXCEEDED = "kv_exceeded"
    """Prompt and output do not fit into an empty KV cache."""
    IMAGE_EXCEEDS_CACHE = "image_exceeds_cache"
    """The tokens of an image do not fit into an empty embedding cache."""
    IMAGES_EXCEED_CACHE = "images_exceed_cache"
    """The tokens of all images of a request, in pages of `detail[0]`, do not fit into an empty embedding cache."""
    CHUNK_EXCEEDED = "chunk_exceeded"
    """Too many tokens attend to each other to fit into a step, next to a decode of each slot."""
    QUEUE_FULL = "queue_full"
    """Too many requests wait, or they hold too many bytes, depending on `setting`. A retry may succeed."""
    DUPLICATE_ID = "duplicate_id"
    """A live request has this id."""
    GIVEN_UP = "given_up"
    """All groups of a stage are retired, for `reason`."""


class Refuse(msgspec.Struct, frozen=True):
    """A request is refused, and nothing of it is kept; `vsched.aio.arrivals` writes the message.

    Attributes:
        value: The number that exceeds the limit.
        limit: The limit.
        setting: The key of the configuration with the limit, if any.
        detail: More numbers; see the code.
        reason: Why no request is served any more, from the last lost group.
    """

    request_id: str
    code: RefusalCode
    value: int = 0
    limit: int = 0
    setting: str = ""
    detail: tuple[int, ...] = ()
    reason: str = ""


class RequestTimes(msgspec.Struct, frozen=True):
    """Times of a request in nanoseconds of the kernel's clock, 0 if it never got there; and counters."""

    submitted_ns: int = 0
    items_ready_ns: int = 0
    admitted_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
    cached_tokens: int = 0
    encoded_items: int = 0
    preemptions: int = 0


class EmitTokens(msgspec.Struct, frozen=True):
    """Send the tokens of this step to clients; the shell has the batch from the rank."""

    step: int


class Finish(msgspec.Struct, frozen=True):
    """The terminal reply of an accepted request."""

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
    """Restart a lost group."""

    group: str


class Drained(msgspec.Struct, frozen=True):
    """A draining group has no more work; it may be stopped, restarted or resumed."""

    group: str


class Notice(msgspec.Struct, frozen=True):
    """A message for operators, such as the error of a policy."""

    message: str


Command = (
    Decide
    | AdmitArrival
    | RejectArrival
    | Accept
    | Refuse
    | EmitTokens
    | Finish
    | SetTimer
    | RestartGroup
    | Drained
    | Notice
)
