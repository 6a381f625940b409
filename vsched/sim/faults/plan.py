"""What can go wrong, as data: a plan is a seed and a list of faults at virtual times, and reads and writes as JSON.

A plan says what is to happen, not how: the parts of a simulation look up what strikes them, see `injection.py`. Faults
are drawn in one place, by random numbers for a swarm and by Hypothesis for shrinking; see
`vsched.testing.schedules.strategies`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar, get_args, get_type_hints

import msgspec

from vsched.errors import ConfigError
from vsched.failures import EncodeErrorKind

T = TypeVar("T")
MILLISECOND_NS = 1_000_000
FAULTS_MAX = 8
"""Most faults of a drawn plan: more hide each other."""

TimeNs = Annotated[int, msgspec.Meta(ge=0)]
Rank = Annotated[int, msgspec.Meta(ge=0)]
RequestPhase = Literal["upload", "prepare", "wait", "encode", "prefill", "decode"]
Direction = Literal["to_rank", "to_leader"]
Effect = Literal["loss", "delay", "duplication", "reordering", "corruption"]


def _tag(name: str) -> str:
    """Return the name of a class as the kind of a fault: `WorkerCrash` is `worker_crash`."""
    return "".join(f"_{one.lower()}" if one.isupper() else one for one in name).lstrip("_")


class Fault(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag=_tag,
):
    """Something that goes wrong at, or as soon as there is an occasion after, a virtual time."""

    at_ns: TimeNs = 0

    @property
    def end_ns(self) -> int:
        """When it is over, as far as the plan says: what it has caused may take longer."""
        return self.at_ns

    def refused(self, why: str) -> ConfigError:
        """Return the error of a simulator that does not have this kind of fault."""
        kind = type(self).__struct_config__.tag
        return ConfigError(f"faults: {kind} at {self.at_ns / 1e9:g} s: {why}")


class Lasting(Fault, frozen=True, kw_only=True):
    """A fault that holds for a while."""

    duration_ns: TimeNs

    @property
    def end_ns(self) -> int:
        """When it is over."""
        return self.at_ns + self.duration_ns


class WorkerCrash(Fault, frozen=True, kw_only=True):
    """A rank's process ends, when it has carried out its next step, before or after it said so."""

    group: str
    rank: Rank = 0
    moment: Literal["before_reply", "after_reply"] = "before_reply"


class Hang(Lasting, frozen=True, kw_only=True):
    """A rank stops in its next step, its pulse included."""

    group: str
    rank: Rank = 0


class Slowdown(Lasting, frozen=True, kw_only=True):
    """A rank computes slower by a factor."""

    group: str
    rank: Rank = 0
    factor: Annotated[float, msgspec.Meta(ge=1)] = 10.0


class LostHeartbeat(Fault, frozen=True, kw_only=True):
    """A rank's next answer to a heartbeat does not reach the leader."""

    group: str
    rank: Rank = 0


class LateHeartbeat(Fault, frozen=True, kw_only=True):
    """A rank's next answer to a heartbeat comes late."""

    group: str
    rank: Rank = 0
    late_ns: TimeNs


class MissedDecision(Fault, frozen=True, kw_only=True):
    """One rank of a group does not get the next decision; the others do."""

    group: str
    rank: Rank = 0


class MessageFault(Lasting, frozen=True, kw_only=True):
    """A share of the frames between a leader and a rank is lost, late, doubled, overtaken or damaged.

    `late_ns` is how much later a delayed frame comes, a copy after its original, and a frame that others overtake.
    """

    group: str
    rank: Rank = 0
    direction: Direction = "to_rank"
    effect: Effect = "loss"
    rate: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    late_ns: TimeNs = 10 * MILLISECOND_NS


class Partition(Lasting, frozen=True, kw_only=True):
    """Nothing passes between a leader and a rank; what is under way meanwhile waits for the end, or is lost."""

    group: str
    rank: Rank = 0
    frames: Literal["held", "lost"] = "held"


class Disconnect(Fault, frozen=True, kw_only=True):
    """The client of the first request that is in this phase goes away."""

    phase: RequestPhase


class FetchStall(Lasting, frozen=True, kw_only=True):
    """The next image that is fetched stops coming."""


class DecodeError(Fault, frozen=True, kw_only=True):
    """The next image that is decoded turns out to be damaged."""


class OutOfMemory(Fault, frozen=True, kw_only=True):
    """A rank finds no memory on its device, while it loads or in a step."""

    group: str
    rank: Rank = 0
    during: Literal["step", "load"] = "step"


class ReplicaRestart(Fault, frozen=True, kw_only=True):
    """An operator restarts a group."""

    group: str


class GroupOutage(Fault, frozen=True, kw_only=True):
    """A group is lost, with those that share its processes, for a while or, without a duration, for good."""

    group: str
    duration_ns: TimeNs | None = None

    @property
    def end_ns(self) -> int:
        """When it is over; of an outage for good, when it begins."""
        return self.at_ns + (self.duration_ns or 0)


class EncodeFailure(Fault, frozen=True, kw_only=True):
    """The next step of an encode group that ends fails; its ranks go on."""

    group: str = "encode"
    error: EncodeErrorKind = EncodeErrorKind.FAILED


class HostCrash(Lasting, frozen=True, kw_only=True):
    """A host ends with all its ranks, and is there again in the end; nothing tells it where it loses its power."""

    host: str
    manner: Literal["killed", "powered_off"] = "killed"


class HostStall(Lasting, frozen=True, kw_only=True):
    """A host stands still with all its ranks; what is sent to it meanwhile waits there."""

    host: str


class HostCut(Lasting, frozen=True, kw_only=True):
    """Nothing passes between the engine and a host; what is under way comes afterwards, as TCP sends it again."""

    host: str


class SlowHostLink(Lasting, frozen=True, kw_only=True):
    """The link to a host has less bandwidth and more latency by a factor."""

    host: str
    factor: Annotated[float, msgspec.Meta(ge=1)] = 10.0


class TiePermutation(Fault, frozen=True, kw_only=True):
    """From now on, what is due at the same moment runs in an order drawn from this seed."""

    seed: Annotated[int, msgspec.Meta(ge=0)] = 0


DrawnFault = (
    Disconnect
    | TiePermutation
    | DecodeError
    | FetchStall
    | Slowdown
    | LateHeartbeat
    | LostHeartbeat
    | Hang
    | WorkerCrash
    | OutOfMemory
    | ReplicaRestart
    | MissedDecision
    | MessageFault
    | Partition
)
"""What strikes ranks, links, images and clients."""
GroupWideFault = GroupOutage | EncodeFailure
"""What strikes a group as a whole: in the fast simulator only, and only where it is named."""
HostFault = HostStall | SlowHostLink | HostCut | HostCrash
"""What strikes another host, or the link to it."""
AnyFault = DrawnFault | GroupWideFault | HostFault
KINDS: tuple[type[AnyFault], ...] = get_args(DrawnFault)
"""The kinds that are drawn, the simpler ones first: shrinking goes that way."""
HOST_KINDS: tuple[type[AnyFault], ...] = get_args(HostFault)
"""The kinds that are drawn where there are other hosts, besides."""


def drawn_kinds(
    hosts: Sequence[str], kinds: Sequence[type[AnyFault]] | None = None
) -> Sequence[type[AnyFault]]:
    """Return what can go wrong with these hosts: `kinds`, and without any named all that there are.

    Raises:
        ValueError: When a kind strikes a host, and there is none.
    """
    if kinds is None:
        return (*KINDS, *HOST_KINDS) if hosts else KINDS
    for kind in kinds if not hosts else ():
        if kind in HOST_KINDS:
            raise ValueError(
                f"{kind.__name__} strikes a host, and there is none. Remedy: give hosts=[...], or other kinds"
            )
    return kinds


class FaultPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What goes wrong in a run; `seed` is for everything in the run that is random."""

    seed: int = 0
    faults: tuple[AnyFault, ...] = ()

    @property
    def end_ns(self) -> int:
        """When the last fault is over: from then on, a run has to heal."""
        return max((fault.end_ns for fault in self.faults), default=0)

    def with_more(self, faults: Iterable[AnyFault]) -> FaultPlan:
        """Return a plan with other faults besides, in the order of time."""
        together = sorted((*self.faults, *faults), key=lambda fault: fault.at_ns)
        return msgspec.structs.replace(self, faults=tuple(together))

    def to_json(self) -> str:
        """Return the plan as JSON, a fault a line."""
        lines = (msgspec.json.encode(fault).decode() for fault in self.faults)
        faults = "".join(f"\n  {line}," for line in lines).removesuffix(",")
        return f'{{"seed": {self.seed}, "faults": [{faults}\n]}}'

    @staticmethod
    def from_json(text: str | bytes) -> FaultPlan:
        """Read a plan.

        Raises:
            ConfigError: Says where the plan is wrong.
        """
        try:
            return msgspec.json.decode(text, type=FaultPlan)
        except msgspec.DecodeError as error:
            raise ConfigError(f"this is no fault plan: {error}") from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> FaultPlan:
        """Read a plan from a file.

        Raises:
            ConfigError: When it cannot be read, or says where it is wrong.
        """
        try:
            return FaultPlan.from_json(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


class Choices(Protocol):
    """Where drawn numbers come from: a random generator, or Hypothesis."""

    def integer(self, low: int, high: int) -> int:
        """Draw from `low` to `high`, both included; simpler is lower."""

    def choice(self, options: Sequence[T]) -> T:
        """Draw one; simpler is earlier."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Where faults are drawn for: the groups, the ranks of each, the span of virtual time, and other hosts."""

    groups: tuple[str, ...]
    span_ns: int
    ranks: int = 1
    hosts: tuple[str, ...] = ()


def draw_fault(choices: Choices, kind: type[AnyFault], stage: Stage) -> AnyFault:
    """Draw a fault of a kind; times are whole milliseconds, so that a plan can be read."""
    hints = get_type_hints(kind)
    values: dict[str, Any] = {
        name: _draw_field(choices, name, hints[name], stage) for name in _fields(kind)
    }
    return kind(**values)


def _fields(kind: type[AnyFault]) -> list[str]:
    """Return the fields of a kind in the order in which they are drawn: the time last."""
    return sorted(kind.__struct_fields__, key=lambda name: name == "at_ns")


def _draw_field(choices: Choices, name: str, hint: object, stage: Stage) -> object:
    span_ms = max(1, stage.span_ns // MILLISECOND_NS)
    match name:
        case "at_ns":
            return choices.integer(0, span_ms) * MILLISECOND_NS
        case "duration_ns":
            return choices.integer(1, span_ms) * MILLISECOND_NS
        case "late_ns":
            return choices.integer(1, max(1, span_ms // 10)) * MILLISECOND_NS
        case "group":
            return choices.choice(stage.groups)
        case "host":
            return choices.choice(stage.hosts)
        case "rank":
            return choices.integer(0, stage.ranks - 1)
        case "seed":
            return choices.integer(0, 0xFFFF)
        case "factor":
            return choices.choice((2.0, 10.0, 100.0))
        case "rate":
            return choices.choice((1.0, 0.5, 0.1, 0.01))
        case _:
            return choices.choice(get_args(hint))


class _RandomChoices:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def integer(self, low: int, high: int) -> int:
        return self._rng.randint(low, high)

    def choice(self, options: Sequence[T]) -> T:
        return self._rng.choice(options)


def random_plan(
    rng: random.Random,
    groups: Sequence[str],
    span_ns: int,
    *,
    ranks: int = 1,
    kinds: Sequence[type[AnyFault]] | None = None,
    faults_max: int = FAULTS_MAX,
    hosts: Sequence[str] = (),
) -> FaultPlan:
    """Draw a plan: first which kinds there are at all, then faults of these; by default of all, see `drawn_kinds`.

    A run without some of the kinds reaches what they would have hidden: a system that is restarted all the time never
    gets slow.
    """
    stage = Stage(groups=tuple(groups), span_ns=span_ns, ranks=ranks, hosts=tuple(hosts))
    choices = _RandomChoices(rng)
    seed = rng.getrandbits(32)
    kinds = drawn_kinds(hosts, kinds)
    subset = [kind for kind in kinds if rng.random() < 0.5] or [rng.choice(kinds)]
    faults = [
        draw_fault(choices, rng.choice(subset), stage) for _ in range(rng.randint(0, faults_max))
    ]
    return FaultPlan(seed=seed, faults=tuple(sorted(faults, key=lambda fault: fault.at_ns)))
