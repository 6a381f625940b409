"""Fault plans as data: a seed and a list of faults at virtual times, stored as JSON.

A plan describes faults, not their mechanism: each part of a simulation looks up the faults that
affect it, see `Injector`. Faults are drawn in one place, from a random generator: that of a swarm,
or one of Hypothesis for shrinking; see `vsched.testing.strategies`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec

from vsched.errors import ConfigError
from vsched.probes import armed
from vsched.sim.loop import VirtualLoop

MILLISECOND_NS = 1_000_000
FAULTS_MAX = 8
"""Maximum number of faults in a drawn plan: more would mask each other."""

TimeNs = Annotated[int, msgspec.Meta(ge=0)]
Rank = Annotated[int, msgspec.Meta(ge=0)]
RequestPhase = Literal["upload", "prepare", "wait", "encode", "prefill", "decode"]
Moment = Literal["before_reply", "after_reply"]
Direction = Literal["to_rank", "to_leader"]
Effect = Literal["loss", "delay", "duplication", "reordering", "corruption"]


def _tag(name: str) -> str:
    """Derive the kind of a fault from its class name: `WorkerCrash` is `worker_crash`."""
    return "".join(f"_{one.lower()}" if one.isupper() else one for one in name).lstrip("_")


class Fault(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag=_tag,
):
    """A failure at a virtual time, or at the first occasion after it."""

    at_ns: TimeNs = 0

    @property
    def end_ns(self) -> int:
        """Planned end of the fault; its consequences may last longer."""
        return self.at_ns


class Lasting(Fault, frozen=True, kw_only=True):
    """A fault with a duration."""

    duration_ns: TimeNs

    @property
    def end_ns(self) -> int:
        """End of the fault."""
        return self.at_ns + self.duration_ns


class WorkerCrash(Fault, frozen=True, kw_only=True):
    """A rank's process ends after its next step, before or after the reply."""

    group: str
    rank: Rank = 0
    moment: Moment = "before_reply"


class Hang(Lasting, frozen=True, kw_only=True):
    """A rank blocks in its next step and stops its heartbeat."""

    group: str
    rank: Rank = 0


class Slowdown(Lasting, frozen=True, kw_only=True):
    """A rank computes slower by a factor."""

    group: str
    rank: Rank = 0
    factor: Annotated[float, msgspec.Meta(ge=1)] = 10.0


class LostHeartbeat(Fault, frozen=True, kw_only=True):
    """A rank's next heartbeat reply is lost."""

    group: str
    rank: Rank = 0


class LateHeartbeat(Fault, frozen=True, kw_only=True):
    """A rank's next heartbeat reply is late."""

    group: str
    rank: Rank = 0
    late_ns: TimeNs


class MissedDecision(Fault, frozen=True, kw_only=True):
    """One rank of a group does not receive the next decision; the others do."""

    group: str
    rank: Rank = 0


class MessageFault(Lasting, frozen=True, kw_only=True):
    """A share of the frames between a leader and a rank is lost, delayed, duplicated, reordered or corrupted.

    `late_ns` is the delay of a delayed frame, of a duplicate, and of a frame that others overtake.
    """

    group: str
    rank: Rank = 0
    direction: Direction = "to_rank"
    effect: Effect = "loss"
    rate: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    late_ns: TimeNs = 10 * MILLISECOND_NS


class Partition(Lasting, frozen=True, kw_only=True):
    """No frame passes between a leader and a rank; frames in flight are held until the end, or lost."""

    group: str
    rank: Rank = 0
    frames: Literal["held", "lost"] = "held"


class Disconnect(Fault, frozen=True, kw_only=True):
    """The client of the first request in this phase disconnects."""

    phase: RequestPhase


class FetchStall(Lasting, frozen=True, kw_only=True):
    """The download of the next fetched image stalls."""


class DecodeError(Fault, frozen=True, kw_only=True):
    """The next decoded image is corrupt."""


class OutOfMemory(Fault, frozen=True, kw_only=True):
    """A rank runs out of device memory, while loading or in a step."""

    group: str
    rank: Rank = 0
    during: Literal["step", "load"] = "step"


class ReplicaRestart(Fault, frozen=True, kw_only=True):
    """An operator restarts a group."""

    group: str


class HostCrash(Lasting, frozen=True, kw_only=True):
    """A host and all its ranks end, and restart after the duration; after a power loss, peers get no notice."""

    host: str
    mode: Literal["killed", "powered_off"] = "killed"


class HostStall(Lasting, frozen=True, kw_only=True):
    """A host and all its ranks stand still; messages sent to it wait."""

    host: str


class HostCut(Lasting, frozen=True, kw_only=True):
    """Nothing passes between the engine and a host; data in flight arrives afterwards, as TCP resends it."""

    host: str


class SlowHostLink(Lasting, frozen=True, kw_only=True):
    """The link to a host has lower bandwidth and higher latency by a factor."""

    host: str
    factor: Annotated[float, msgspec.Meta(ge=1)] = 10.0


class TiePermutation(Fault, frozen=True, kw_only=True):
    """From this time on, callbacks due at the same moment run in an order drawn from this seed."""

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
"""Faults of ranks, links, images and clients."""
HostFault = HostStall | SlowHostLink | HostCut | HostCrash
"""Faults of another host or the link to it."""
AnyFault = DrawnFault | HostFault
KINDS: tuple[type[AnyFault], ...] = get_args(DrawnFault)
"""Drawn kinds, simpler first: the direction of shrinking."""
HOST_KINDS: tuple[type[AnyFault], ...] = get_args(HostFault)
"""Additional kinds drawn if there are other hosts."""


def drawn_kinds(
    hosts: Sequence[str], kinds: Sequence[type[AnyFault]] | None = None
) -> Sequence[type[AnyFault]]:
    """Return the kinds of faults that can occur with these hosts: `kinds`, by default all.

    Raises:
        ValueError: When a kind needs a host and there is none.
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
    """The faults of a run; `seed` is for readers, since all random draws of a run follow the seed of its engine."""

    seed: int = 0
    faults: tuple[AnyFault, ...] = ()

    @property
    def end_ns(self) -> int:
        """End of the last fault; afterwards a run must recover."""
        return max((fault.end_ns for fault in self.faults), default=0)

    def to_json(self) -> str:
        """Return the plan as JSON, one fault per line."""
        lines = (msgspec.json.encode(fault).decode() for fault in self.faults)
        faults = "".join(f"\n  {line}," for line in lines).removesuffix(",")
        return f'{{"seed": {self.seed}, "faults": [{faults}\n]}}'

    @staticmethod
    def from_json(text: str | bytes) -> FaultPlan:
        """Parse a plan.

        Raises:
            ConfigError: When the plan is invalid; names the place.
        """
        try:
            return msgspec.json.decode(text, type=FaultPlan)
        except msgspec.DecodeError as error:
            raise ConfigError(f"this is no fault plan: {error}") from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> FaultPlan:
        """Read a plan from a file.

        Raises:
            ConfigError: When the file cannot be read or the plan is invalid; names the place.
        """
        try:
            return FaultPlan.from_json(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Targets of drawn faults: groups, ranks per group, the span of virtual time, and other hosts."""

    groups: tuple[str, ...]
    span_ns: int
    ranks: int = 1
    hosts: tuple[str, ...] = ()


def draw_fault(rng: random.Random, kind: type[AnyFault], stage: Stage) -> AnyFault:
    """Draw a fault of a kind; lower numbers and earlier options are simpler.

    Times are whole milliseconds, to keep plans readable.
    """
    hints = get_type_hints(kind)
    fields = sorted(kind.__struct_fields__, key=lambda name: name == "at_ns")  # the time last
    values: dict[str, Any] = {name: _draw_field(rng, name, hints[name], stage) for name in fields}
    return kind(**values)


def _draw_field(rng: random.Random, name: str, hint: object, stage: Stage) -> object:
    span_ms = max(1, stage.span_ns // MILLISECOND_NS)
    match name:
        case "at_ns":
            return rng.randint(0, span_ms) * MILLISECOND_NS
        case "duration_ns":
            return rng.randint(1, span_ms) * MILLISECOND_NS
        case "late_ns":
            return rng.randint(1, max(1, span_ms // 10)) * MILLISECOND_NS
        case "group":
            return rng.choice(stage.groups)
        case "host":
            return rng.choice(stage.hosts)
        case "rank":
            return rng.randint(0, stage.ranks - 1)
        case "seed":
            return rng.randint(0, 0xFFFF)
        case "factor":
            return rng.choice((2.0, 10.0, 100.0))
        case "rate":
            return rng.choice((1.0, 0.5, 0.1, 0.01))
        case _:
            return rng.choice(get_args(hint))


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
    """Draw a plan: first a subset of kinds, then faults of these kinds (by default all, see `drawn_kinds`).

    Leaving some kinds out reaches states that they would mask: a system that restarts all the time
    never runs slowly.
    """
    stage = Stage(groups=tuple(groups), span_ns=span_ns, ranks=ranks, hosts=tuple(hosts))
    seed = rng.getrandbits(32)
    kinds = drawn_kinds(hosts, kinds)
    subset = [kind for kind in kinds if rng.random() < 0.5] or [rng.choice(kinds)]
    faults = [draw_fault(rng, rng.choice(subset), stage) for _ in range(rng.randint(0, faults_max))]
    return FaultPlan(seed=seed, faults=tuple(sorted(faults, key=lambda fault: fault.at_ns)))


F = TypeVar("F", bound=Fault)
L = TypeVar("L", bound=Lasting)
Kinds = type[F] | tuple[type[F], ...]
"""A kind of fault, or several."""


class Struck(msgspec.Struct, frozen=True):
    """A fault, and the first time it had an effect."""

    now_ns: int
    fault: AnyFault


class Injector:
    """Injects the faults of a plan on a virtual loop.

    A one-time fault goes to the first caller that asks once it is due; a lasting fault is visible
    to all callers while it lasts. `TiePermutation` is applied here.

    Attributes:
        plan: The planned faults.
        struck: Faults that had an effect, in order; the other planned faults found no occasion.
    """

    def __init__(self, plan: FaultPlan, loop: VirtualLoop) -> None:
        self.plan = plan
        self.struck: list[Struck] = []
        self._loop = loop
        self._left: list[AnyFault] = sorted(plan.faults, key=lambda fault: fault.at_ns)
        self._points: dict[str, tuple[type[Fault], Callable[[Fault], Exception]]] = {}
        for fault in self.of(TiePermutation):
            loop.call_at_ns(fault.at_ns, self._permute, fault)

    def of(self, kind: Kinds[F], *, group: str | None = None, rank: int | None = None) -> list[F]:
        """Return all planned faults of a kind for this target, past and future; None matches any."""
        return [
            fault for fault in self.plan.faults if isinstance(fault, kind) and _hits(fault, group, rank)
        ]  # fmt: skip

    def take_fault(
        self,
        kind: Kinds[F],
        *,
        group: str | None = None,
        rank: int | None = None,
        such: Callable[[F], bool] = lambda _: True,
    ) -> F | None:
        """Remove and return the first fault of a kind that is due for this target."""
        now_ns = self._loop.now_ns()
        for place, fault in enumerate(self._left):
            if fault.at_ns > now_ns:
                return None
            if isinstance(fault, kind) and _hits(fault, group, rank) and such(fault):
                del self._left[place]
                self.struck.append(Struck(now_ns, fault))
                return fault
        return None

    def active_faults(
        self, kind: Kinds[L], *, group: str | None = None, rank: int | None = None
    ) -> list[L]:
        """Return the faults of a kind that are active for this target."""
        now_ns = self._loop.now_ns()
        found = [
            fault for fault in self.of(kind, group=group, rank=rank) if fault.at_ns <= now_ns < fault.end_ns
        ]  # fmt: skip
        for fault in found:
            self.record_effect(fault)
        return found

    def record_effect(self, fault: Fault) -> None:
        """Record that a lasting fault had an effect."""
        for place, one in enumerate(self._left):
            if one is fault:
                del self._left[place]
                self.struck.append(Struck(self._loop.now_ns(), one))
                return

    def raise_at(self, point: str, kind: type[F], error: Callable[[F], Exception]) -> None:
        """Make a fault point raise `error(fault)` for each fault of a kind, once it is due.

        A fault that names a group applies only when that group is the subject.
        """
        self._points[point] = (kind, error)  # type: ignore[assignment] # the kind goes with its error

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Enable the fault points of production code within the context."""
        with armed(self._on_point):
            yield

    def _on_point(self, name: str, subject: str) -> None:
        if name in self._points:
            kind, error = self._points[name]
            fault = self.take_fault(kind, group=subject or None)
            if fault is not None:
                raise error(fault)

    def _permute(self, fault: TiePermutation) -> None:
        self.record_effect(fault)
        self._loop.permute_ties(fault.seed)


def _hits(fault: Fault, group: str | None, rank: int | None) -> bool:
    """Return True if a fault applies to a target; a fault without a group applies to all."""
    return (group is None or getattr(fault, "group", group) == group) and (
        rank is None or getattr(fault, "rank", rank) == rank
    )
