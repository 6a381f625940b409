"""What can go wrong in the fast simulator: a few things that change what the scheduler hears.

What goes wrong between a leader and its ranks is for simulations of whole servers; see `vsched.sim.faults.plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from vsched.errors import ConfigError
from vsched.sim.fast.groups import SimulatedGroup, TimedEncodeGroup

Seconds = Annotated[float, Meta(ge=0)]


class Outage(msgspec.Struct, frozen=True, kw_only=True, tag="outage"):
    """A group is lost, with those that share its processes; it comes back at `back_s`, or never."""

    group: str
    lost_s: Seconds
    back_s: Seconds | None = None


class EncodeFault(msgspec.Struct, frozen=True, kw_only=True, tag="encode_fault"):
    """The first step of an encode group that ends at this time or later fails; its ranks go on."""

    at_s: Seconds
    group: str = "encode"
    message: str = "the image could not be encoded"


class Slowness(msgspec.Struct, frozen=True, kw_only=True, tag="slowness"):
    """The steps of a group that begin in this span take so many times as long."""

    group: str
    from_s: Seconds
    to_s: Seconds
    factor: Annotated[float, Meta(gt=0)] = 10.0


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag="pause"):
    """Steps of a group that would begin in this span begin at its end."""

    group: str
    from_s: Seconds
    to_s: Seconds


Trouble = Outage | EncodeFault | Slowness | Pause


class Lost(msgspec.Struct, frozen=True):
    """A group goes down, for good or not."""

    group: SimulatedGroup
    for_good: bool


class Opened(msgspec.Struct, frozen=True):
    """A group is up."""

    group: SimulatedGroup


class Failing(msgspec.Struct, frozen=True):
    """The next step of an encode group fails."""

    group: TimedEncodeGroup
    message: str

    def strike(self, _start_ns: int) -> None:
        """Let it happen."""
        self.group.faults.append(self.message)


class Paced(msgspec.Struct, frozen=True):
    """Steps of a group take so many times as long from now on."""

    group: SimulatedGroup
    factor: float

    def strike(self, _start_ns: int) -> None:
        """Let it happen."""
        self.group.slowdown = self.factor


class Held(msgspec.Struct, frozen=True):
    """No step of a group begins before a time."""

    group: SimulatedGroup
    until_s: float

    def strike(self, start_ns: int) -> None:
        """Let it happen, in a workload that began then."""
        self.group.held_ns = start_ns + int(self.until_s * 1e9)


Change = Lost | Opened | Failing | Paced | Held


def changes(
    troubles: Iterable[Trouble], groups: Sequence[SimulatedGroup]
) -> Iterator[tuple[float, Change]]:
    """Return what happens to groups, and when, in seconds.

    Raises:
        ConfigError: When there is no such group, or it does not encode.
    """
    named = {group.name: group for group in groups}
    for trouble in troubles:
        group = named.get(trouble.group)
        if group is None:
            raise ConfigError(f"{trouble.group}: no such group. Known: {', '.join(named)}")
        match trouble:
            case Outage(lost_s=lost_s, back_s=back_s):
                for one in groups:
                    if one.device is group.device:
                        yield lost_s, Lost(one, for_good=back_s is None)
                        if back_s is not None:
                            yield max(back_s, lost_s), Opened(one)
            case EncodeFault(at_s=at_s, message=message):
                if not isinstance(group, TimedEncodeGroup):
                    raise ConfigError(f"{trouble.group}: not an encode group")
                yield at_s, Failing(group, message)
            case Slowness(from_s=from_s, to_s=to_s, factor=factor):
                yield from_s, Paced(group, factor)
                yield max(from_s, to_s), Paced(group, 1.0)
            case Pause(from_s=from_s, to_s=to_s):
                yield from_s, Held(group, to_s)
