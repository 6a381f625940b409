"""What happens to the kernel."""

from __future__ import annotations

from array import array

import msgspec

from vsched.failures import EncodeErrorKind, GroupFailure
from vsched.types import FinishReason, Request


class FurtherAnswer(msgspec.Struct, frozen=True, array_like=True):
    """One more answer to a request: a sequence of its own, which differs from the first in its id and seed alone."""

    request_id: str
    seed: int


class Knocked(msgspec.Struct, frozen=True):
    """A request is at the front door; `Enter` or `TurnAway` answers it, at once or later.

    `knock` is its number there: each has one of its own. The rest is what is known of it before its preparation.
    """

    knock: int
    tenant: str = ""
    priority: int = 0
    ttft_target_ms: int | None = None
    images: int = 0
    answers: int = 1
    outputs_max: int = 0


class Withdrawn(msgspec.Struct, frozen=True):
    """A request that knocked will not be submitted: its client left, or it could not be prepared."""

    knock: int


class Submitted(msgspec.Struct, frozen=True):
    """A request is prepared; all its answers are accepted, or none. The further ones share the prompt of the first.

    `knock` is its number at the front door, 0 for one that never was there. `emitted` are tokens that the first answer
    has already, from an engine before this one: it goes on behind them.
    """

    request: Request
    stop_token_ids: tuple[int, ...] = ()
    further: tuple[FurtherAnswer, ...] = ()
    knock: int = 0
    emitted: tuple[int, ...] = ()


class Aborted(msgspec.Struct, frozen=True):
    """A request must end now: its client left (`abort`), or the engine found a stop string (`stop`)."""

    request_id: str
    reason: FinishReason = FinishReason.ABORT


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """A rank's word that the sequence in a slot ended with this step's token."""

    slot: int
    number: int
    reason: FinishReason


class Drafted(msgspec.Struct, frozen=True, array_like=True):
    """What came of the drafts of a slot in a step: how many they were, and the tokens that followed its first."""

    slot: int
    drafts: int
    tokens: list[int]


class Stepped(msgspec.Struct, frozen=True):
    """A generate step is done.

    Shape: `tokens` is int32, indexed by slot; entries of slots that yielded no token are -1 and never read.
    `busy_ns` is how long the ranks worked on it, 0 where it was not measured. `drafted` tells of the slots that ranks
    drafted for. `swap_ns` is the part of `busy_ns` in which `swap_blocks` blocks were copied.
    """

    step: int
    tokens: array[int]
    finished: list[Finished] = []
    busy_ns: int = 0
    group: str = "generate"
    drafted: list[Drafted] = []
    swap_ns: int = 0
    swap_blocks: int = 0


class Encoded(msgspec.Struct, frozen=True):
    """An encode step is done; every item of it is in its pages."""

    step: int
    group: str = "encode"


class EncodeFailed(msgspec.Struct, frozen=True):
    """An encode step failed; the rank goes on."""

    step: int
    failure: EncodeErrorKind
    group: str = "encode"


class RowsLost(msgspec.Struct, frozen=True):
    """The embedding rows in these pages are gone with the hosts that had them."""

    pages: list[int]


class GroupReady(msgspec.Struct, frozen=True):
    """All ranks of a group are up, with nothing in them; see `vsched.types.group_names`."""

    group: str


class GroupLost(msgspec.Struct, frozen=True):
    """A group is gone, with all that it held; `RestartGroup` answers it.

    `planned` says that it was ended on purpose: nothing that ran there is to blame.
    """

    group: str
    failure: GroupFailure
    planned: bool = False


class GroupRetired(msgspec.Struct, frozen=True):
    """A lost group will not come back: its requests go to the other groups of its stage."""

    group: str
    failure: GroupFailure


class Drain(msgspec.Struct, frozen=True):
    """Give a group nothing new: what runs there ends, what waits goes elsewhere. `Drained` answers it.

    What ran there when it was lost goes nowhere else: it ends there, too.
    """

    group: str


class Resume(msgspec.Struct, frozen=True):
    """Give a draining group work again."""

    group: str


class TimerFired(msgspec.Struct, frozen=True):
    """The time of an earlier `SetTimer` has come."""


class PolicyReplaced(msgspec.Struct, frozen=True):
    """From now on the kernel's default decides in place of the policy of a seat, for the reason that is given."""

    seat: str
    reason: str


class Cleared(msgspec.Struct, frozen=True):
    """Interrupt every running and waiting request; they end with this message and code."""

    message: str = "the server was cleared"
    code: str = "cleared"


Event = (
    Knocked
    | Withdrawn
    | Submitted
    | Aborted
    | Stepped
    | Encoded
    | EncodeFailed
    | RowsLost
    | GroupReady
    | GroupLost
    | GroupRetired
    | Drain
    | Resume
    | TimerFired
    | PolicyReplaced
    | Cleared
)
