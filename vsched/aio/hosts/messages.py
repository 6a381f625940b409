"""What an engine and a host say to each other about one start of a worker group.

Everything travels on one ordered stream: what a decision reads comes before the decision, and the rows that a batch
yielded before its result. Frames of the decision log and reports of ranks are passed on as they are, and nobody but
leader and rank reads them. No message holds a time of day, or one of any clock: a duration is all that is told.
"""

from __future__ import annotations

from importlib.metadata import version

import msgspec

from vsched.types import ArenaLayout
from vsched.worker.spec import RankSpec

VERSION = version("vsched")
"""Engine and hosts are of one version: a rank's specification has no other form to fall back to."""


class ByteRange(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of the arena, counted from its begin."""

    offset: int
    size: int


class OpenGroups(msgspec.Struct, frozen=True, tag=True):
    """The engine's first word: groups that are to be served, and the arena that their ranks expect.

    Each side says something every `alive_s`, and gives the other up when it hears nothing for `silence_s`.
    """

    version: str
    engine: str
    groups: list[str]
    layout: ArenaLayout
    alive_s: float
    silence_s: float


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Start a rank; what its specification leaves open follows from the host that hears this."""

    spec: RankSpec


class ToRank(msgspec.Struct, frozen=True, tag=True):
    """Pass an entry of a group's decision log on to a rank."""

    group: str
    rank: int
    frame: bytes


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Send these bytes of the arena, and `Fetched` after them: as soon as a step of a group is done, before its result.

    At once where that was before this was heard, and with `step` 0.
    """

    number: int
    group: str
    step: int
    ranges: list[ByteRange]


class Admit(msgspec.Struct, frozen=True, tag=True):
    """Whoever proves to have this key may fetch rows of this start; `Admitted` answers, or `Unreached`.

    Where that is not to be encrypted, the key is a name, and its password proves it.
    """

    key: bytes
    encrypted: bool = True


class Reach(msgspec.Struct, frozen=True, tag=True):
    """Connect with another host that rows can be fetched from; `Reached` answers, or `Unreached`, now or later.

    `public` and `secret` are keys for this connection alone, which the other host admits by the first; without
    encryption, name and password.
    """

    address: str
    host_key: bytes
    public: bytes
    secret: bytes
    encrypted: bool = True


class Pull(msgspec.Struct, frozen=True, tag=True):
    """Fetch bytes from the host that was reached with this key; `Fetched` answers."""

    number: int
    key: bytes
    group: str
    step: int
    ranges: list[ByteRange]


class CutWay(msgspec.Struct, frozen=True, tag=True):
    """Nothing more goes to, or comes from, who was admitted or reached with this key."""

    key: bytes


class Kill(msgspec.Struct, frozen=True, tag=True):
    """End a rank at once."""

    rank: int


class Bye(msgspec.Struct, frozen=True, tag=True):
    """The engine wants nothing more: what still runs is killed."""


class Write(msgspec.Struct, frozen=True, tag=True):
    """Bytes for the other side's arena."""

    offset: int
    data: bytes


class Alive(msgspec.Struct, frozen=True, tag=True):
    """There is nothing else to say."""


class Held(msgspec.Struct, frozen=True, tag=True):
    """What is to be said next waits for bytes of another host; said instead of `Alive`, so that ranks wait, too."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The host's first word."""

    name: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The host's last word: it does not serve these groups, or no more, and why."""

    why: str


class Launched(msgspec.Struct, frozen=True, tag=True):
    """A rank has this process id on its host."""

    rank: int
    pid: int


class FromRank(msgspec.Struct, frozen=True, tag=True):
    """What a rank said; `identity` is that of its socket."""

    group: str
    identity: bytes
    frame: bytes


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """The bytes that were asked for under this number came, all before this; not `sent` where the step failed.

    It answers `Pull` as well: the bytes are in the arena of who says so.
    """

    number: int
    sent: bool


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """A key is known at this port of the host."""

    key: bytes
    port: int


class Reached(msgspec.Struct, frozen=True, tag=True):
    """The other host answers, and rows can be pulled from it."""

    key: bytes


class Unreached(msgspec.Struct, frozen=True, tag=True):
    """The other host does not answer, or no more, and why."""

    key: bytes
    why: str


class Unsent(msgspec.Struct, frozen=True, tag=True):
    """An entry did not get through to a rank: it is gone, or does not read."""

    group: str
    rank: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A rank's process has ended; a negative code is the signal that killed it."""

    rank: int
    code: int


ToHost = (
    OpenGroups
    | Launch
    | ToRank
    | Fetch
    | Admit
    | Reach
    | Pull
    | CutWay
    | Kill
    | Bye
    | Write
    | Alive
    | Held
)
ToEngine = (
    Opened
    | Refused
    | Launched
    | FromRank
    | Fetched
    | Admitted
    | Reached
    | Unreached
    | Unsent
    | Exited
    | Write
    | Alive
)
ToOwner = Fetch | Alive
"""What a host says to one that it fetches rows from."""
FromOwner = Fetched | Write | Alive
"""What that one answers."""
