"""Messages between an engine and a host about one start of a worker group.

Everything travels on one ordered stream: arena bytes before the decision that reads them, and the embedding rows of an
encode batch before its result. Frames of the decision log and reports of ranks are forwarded unchanged; only leader and
rank decode them. No message contains a clock reading, only durations.
"""

from __future__ import annotations

from importlib.metadata import version

import msgspec

from vsched.types import ArenaLayout
from vsched.worker.spec import RankSpec

VERSION = version("vsched")
"""Engine and hosts must have the same version: there is one format of a rank's specification."""


class ByteRange(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of the arena, by offset from its start."""

    offset: int
    size: int


class OpenGroups(msgspec.Struct, frozen=True, tag=True):
    """The engine's first message: groups to serve, and the arena that their ranks expect.

    Each side sends something every `alive_s`, and gives the other up when it receives nothing for `silence_s`.
    """

    version: str
    engine: str
    groups: list[str]
    layout: ArenaLayout
    alive_s: float
    silence_s: float


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Start a rank; the receiving host fills in the open parts of its specification."""

    spec: RankSpec


class ToRank(msgspec.Struct, frozen=True, tag=True):
    """Forward an entry of a group's decision log to a rank."""

    group: str
    rank: int
    frame: bytes


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Send these bytes of the arena when a step of a group succeeds, before its result."""

    group: str
    step: int
    ranges: list[ByteRange]


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Kill a rank at once."""

    rank: int


class Bye(msgspec.Struct, frozen=True, tag=True):
    """The engine's last message: kill all ranks that still run."""


class Write(msgspec.Struct, frozen=True, tag=True):
    """Bytes for the other side's arena."""

    offset: int
    data: bytes


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat of a side with nothing else to send."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The host's first message."""

    name: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The host's last message: it does not serve these groups, or stops serving them, and why."""

    why: str


class Launched(msgspec.Struct, frozen=True, tag=True):
    """A rank's process id on its host."""

    rank: int
    pid: int


class FromRank(msgspec.Struct, frozen=True, tag=True):
    """A report of a rank, with the `identity` of its socket."""

    group: str
    identity: bytes
    frame: bytes


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """A step is done: no more of the bytes that were requested with its `Fetch` will come."""

    group: str
    step: int


class Unsent(msgspec.Struct, frozen=True, tag=True):
    """An entry could not be delivered to a rank, which is gone or does not read."""

    group: str
    rank: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A rank's process has ended; a negative code is the signal that killed it."""

    rank: int
    code: int


ToHost = OpenGroups | Launch | ToRank | Fetch | Kill | Bye | Write | Alive
ToEngine = Opened | Refused | Launched | FromRank | Fetched | Unsent | Exited | Write | Alive
