"""Events: the input of the scheduler."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from vsched.failures import EncodeErrorKind, GroupFailure
from vsched.types import FinishReason, Request

if TYPE_CHECKING:
    Tokens = array[int]
else:  # `array` takes no type arguments at run time
    Tokens = array


class FurtherChoice(msgspec.Struct, frozen=True, array_like=True):
    """A further choice of a request; it differs from the first in its id and seed only."""

    request_id: str
    seed: int


class Arrived(msgspec.Struct, frozen=True):
    """A request has arrived, with the fields that are known before its preparation.

    `AdmitArrival` or `RejectArrival` answers it, at once or later; `arrival_id` is unique.
    """

    arrival_id: int
    tenant: str = ""
    priority: int = 0
    ttft_target_ms: int | None = None
    images: int = 0
    choices: int = 1
    outputs_max: int = 0
    session: str = ""


class Withdrawn(msgspec.Struct, frozen=True):
    """An arrived request will not be submitted: its client disconnected, or its preparation failed."""

    arrival_id: int


class Submitted(msgspec.Struct, frozen=True):
    """A request is prepared; all its choices are accepted, or none. They share the prompt.

    `arrival_id` is from `Arrived`, 0 without that event. `emitted` are tokens of the first choice from an earlier
    engine, which is continued.
    """

    request: Request
    stop_token_ids: tuple[int, ...] = ()
    further: tuple[FurtherChoice, ...] = ()
    arrival_id: int = 0
    emitted: tuple[int, ...] = ()


class Aborted(msgspec.Struct, frozen=True):
    """A request ends now: its client disconnected (`abort`), or the engine found a stop string (`stop`)."""

    request_id: str
    reason: FinishReason = FinishReason.ABORT


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """The sequence in a slot ended with the token of this step."""

    slot: int
    number: int
    reason: FinishReason


class Drafted(msgspec.Struct, frozen=True, array_like=True):
    """The number of drafts of a slot in a step, and the accepted ones, which follow its token."""

    slot: int
    drafts: int
    tokens: list[int]


class Stepped(msgspec.Struct, frozen=True):
    """A generate step is done.

    Shape: `tokens` is int32, indexed by slot; entries of slots without a token are -1 and never read. `busy_ns` is the
    time on the ranks, 0 if it was not measured. `drafted` are the slots with drafts. `swap_ns` is the part of `busy_ns`
    for copying `swap_blocks` blocks.
    """

    step: int
    tokens: Tokens
    finished: list[Finished] = []
    busy_ns: int = 0
    group: str = "generate"
    drafted: list[Drafted] = []
    swap_ns: int = 0
    swap_blocks: int = 0


class Encoded(msgspec.Struct, frozen=True):
    """An encode step is done; all its items are in their pages."""

    step: int
    group: str = "encode"


class EncodeFailed(msgspec.Struct, frozen=True):
    """An encode step failed, but not the rank."""

    step: int
    failure: EncodeErrorKind
    group: str = "encode"


class GroupReady(msgspec.Struct, frozen=True):
    """All ranks of a group have started, without any requests; see `vsched.types.group_names`.

    `blocks` are its KV blocks if it came back with fewer than the limits have; 0 for all, and for encode groups.
    """

    group: str
    blocks: int = 0


class GroupLost(msgspec.Struct, frozen=True):
    """A group is lost, with its KV and batches; `RestartGroup` answers it.

    With `planned`, it was stopped on purpose, and no request is to blame.
    """

    group: str
    failure: GroupFailure
    planned: bool = False


class GroupRetired(msgspec.Struct, frozen=True):
    """A lost group will not be restarted: its requests move to other groups of its stage."""

    group: str
    failure: GroupFailure


class Drain(msgspec.Struct, frozen=True):
    """Drain a group: running requests finish, waiting ones move to other groups. `Drained` answers it.

    Requests that ran there when it was lost do not move; they finish there, too.
    """

    group: str


class Resume(msgspec.Struct, frozen=True):
    """Let a draining group take work again."""

    group: str


class TimerFired(msgspec.Struct, frozen=True):
    """The deadline of an earlier `SetTimer` has passed."""


class PolicyReplaced(msgspec.Struct, frozen=True):
    """From now on, the default decides at `seat`; or, with `tables`, new policies decide at the seats of these tables.

    `tables` are configuration tables by path. `seats` in the table `policy` lists the tables that it stands for.
    """

    seat: str = ""
    reason: str = ""
    tables: dict[str, dict[str, Any]] = {}


class Cleared(msgspec.Struct, frozen=True):
    """End all running and waiting requests with this message and code."""

    message: str = "the server was cleared"
    code: str = "cleared"


Event = (
    Arrived
    | Withdrawn
    | Submitted
    | Aborted
    | Stepped
    | Encoded
    | EncodeFailed
    | GroupReady
    | GroupLost
    | GroupRetired
    | Drain
    | Resume
    | TimerFired
    | PolicyReplaced
    | Cleared
)
