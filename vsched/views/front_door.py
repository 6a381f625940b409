"""What a front-door policy sees, and what it may answer.

A request is at the front door when it has been read and nothing has been done for it: its images are not fetched, its
prompt is not tokenized.
"""

from __future__ import annotations

from typing import Any

import msgspec

from vsched.measured import NOTHING_MEASURED, Measured


class ArrivalView(msgspec.Struct, frozen=True, kw_only=True):
    """A request at the front door.

    Attributes:
        tenant: Whose it is; empty where nobody says.
        arrived_ns: When it came to the door.
        target_ns: When its first token is due; None without a target.
        images: Images that it shows.
        answers: Answers that it asks for.
        outputs_max: Tokens that each may have; 0 for as many as the context leaves.
        asks: How often the policy was asked about it before: 0, or as often as it was held.
    """

    tenant: str = ""
    priority: int = 0
    arrived_ns: int
    target_ns: int | None = None
    images: int = 0
    answers: int = 1
    outputs_max: int = 0
    asks: int = 0


class FrontDoorView(msgspec.Struct, frozen=True, kw_only=True):
    """What a front-door policy sees.

    Attributes:
        request: The one that it is asked about, which is in none of the numbers below.
        held: Requests that are held at the door.
        preparing: Requests that were let in, and whose prompt and images are being prepared.
        waiting: Requests that wait for their first step.
        as_urgent: Those of the held, the prepared and the waiting whose priority is that of the request or higher.
        running: Requests that hold a slot.
        waiting_max: Most requests that may wait; further ones are refused after their preparation
            (`generate.max_waiting`).
        tenant_requests: Requests of the same tenant, wherever they are: held, in preparation, waiting or running.
        load_tokens: Prompt and output tokens of all that wait or run; `load_limit_tokens` is what can run at a time.
        measured: Times of all replicas.
        state: What the policy remembers, to be changed in place.
    """

    now_ns: int
    request: ArrivalView
    held: int = 0
    preparing: int = 0
    waiting: int = 0
    as_urgent: int = 0
    running: int = 0
    waiting_max: int = 0
    tenant_requests: int = 0
    load_tokens: int = 0
    load_limit_tokens: int = 0
    measured: Measured = NOTHING_MEASURED
    state: Any = None


class LetIn(msgspec.Struct, frozen=True):
    """Prepare the request, and hand it to the scheduler."""


class Hold(msgspec.Struct, frozen=True):
    """Keep the request at the door, and ask again at a time: within a minute after its arrival."""

    until_ns: int


class Shed(msgspec.Struct, frozen=True):
    """Refuse the request.

    Attributes:
        reason: Why, for the client: a clause without a full stop, with the value and the limit if there are any.
        retry_after_s: When it may try again.
        status: 429 where it is the client that asks for too much, 503 where it is all of them.
    """

    reason: str
    retry_after_s: int = 1
    status: int = 429


class Redirect(msgspec.Struct, frozen=True):
    """Send the client elsewhere: to the same path of another server, which `base_url` names without a path."""

    base_url: str


FrontDoorAnswer = LetIn | Hold | Shed | Redirect
