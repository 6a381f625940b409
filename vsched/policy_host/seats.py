"""Policy seats: the places at which a host calls policies, and the states of policies.

A policy is a function of its view, which includes its state. The kernel keeps the state as bytes. Each call gets a
struct decoded from them, and changes it in place; if its answer is accepted, the struct is encoded, and the next call
gets a new struct. So calls share no object, a failed call leaves no trace, snapshots have the bytes, and a policy gets
the same state in a replay. The cost is to encode and decode a small struct per call, for policies with a state only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import PurePath
from traceback import TracebackException
from typing import Any

import msgspec

from vsched.errors import PolicyError, RecordError, limit_message, reraise_interrupt, safe_text
from vsched.policy import DECISIONS, Decision, Policy, decisions_of
from vsched.policy.checks import HOLD_MIN_NS, SHORT_HOLD
from vsched.policy_host.call_times import Ask as Ask
from vsched.policy_host.snapshot import Restorable, Saved
from vsched.policy_host.stuck_calls import PolicyStuckError, interruptible
from vsched.types import stage_of

STATE_BYTES_MAX = 16 << 10
"""Maximum size of a state: enough for some hundred names with numbers. It is encoded and decoded in every call."""
NOTICES_MAX = 100
"""Maximum number of notices; further failures are only counted, so they cannot flood the log."""

_CORE = tuple(
    str(PurePath(__file__).parents[1] / name) for name in ("kernel", "policy", "policy_host")
)

_PLAIN = (
    msgspec.inspect.NoneType,
    msgspec.inspect.BoolType,
    msgspec.inspect.IntType,
    msgspec.inspect.FloatType,
    msgspec.inspect.StrType,
    msgspec.inspect.BytesType,
    msgspec.inspect.EnumType,
    msgspec.inspect.LiteralType,
)
_encode = msgspec.msgpack.Encoder().encode


BuildPolicy = Callable[[str, Mapping[str, Any]], Policy]
"""Builds the policy for a decision, or for the table `policy`, from a configuration table."""


def _build_none(decision: str, table: Mapping[str, Any]) -> Policy:
    raise PolicyError(f"{decision}: {table.get('use')!r} cannot be built: this host has no `build`")


class SeatPolicies(msgspec.Struct, frozen=True, kw_only=True):
    """The policies of a host.

    Attributes:
        by_table: The policies by the paths of their configuration tables; a memory policy is not used.
        several: The policy that makes several decisions with one state; None if each seat has its own state.
        build: Builds the policies of a `PolicyReplaced`; equal tables must give equal policies.
    """

    by_table: Mapping[str, Policy]
    several: Policy | None = None
    build: BuildPolicy = _build_none


class PolicyFaults(Restorable):
    """Counts policy failures and keeps notices of them until the scheduler takes them.

    Attributes:
        counts: Number of failures since the policy was installed, by the name of its class.
        first: The traceback of each policy's first failure since then or since this kernel was created, by that name;
            of its failures by other types of exception, by that name and theirs.
    """

    counts: Saved[dict[str, int]]
    notices: Saved[list[str]]

    def __init__(self) -> None:
        self.counts = {}
        self.notices = []
        self.first: dict[str, TracebackException] = {}
        self._kinds: dict[str, str] = {}

    def report(self, policy: Policy, method: str, error: BaseException, shown: object) -> None:
        """Count a failure, and word a notice with the policy's input.

        Raises:
            KeyboardInterrupt: When Ctrl-C interrupted the policy, which is no failure of it.
        """
        reraise_interrupt(error)
        name, kind = type(policy).__name__, type(error).__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        if self.counts[name] > NOTICES_MAX:
            return
        # Without source lines, since the kernel does no I/O.
        trace = TracebackException.from_exception(error, lookup_lines=False)
        is_first_kind = self._kinds.setdefault(name, kind) == kind
        self.first.setdefault(name if is_first_kind else f"{name}, {kind}", trace)
        self.notices.append(
            f"policy {name} failed at {_place(policy, method, trace)} ({kind}: {safe_text(error, str):.500}); "
            f"the default decided. Input: {safe_text(shown):.500}"
        )

    def forget(self, policy: Policy) -> None:
        """Clear the failures of a policy class on installation: a new policy of this name gets notices again."""
        name = type(policy).__name__
        self.counts.pop(name, None)
        self._kinds.pop(name, None)
        for key in [*self.first]:
            if key.partition(",")[0] == name:
                del self.first[key]

    def take_notices(self) -> list[str]:
        """Return the notices since this was last asked."""
        notices, self.notices = self.notices, []
        return notices


def _place(policy: Policy, method: str, trace: TracebackException) -> str:
    """Return the location of a failure: the innermost frame outside kernel and checks, else the method that answered.

    File names have no folders, so that a digest over notices does not depend on the location of the code.
    """
    outside = [frame for frame in trace.stack if not frame.filename.startswith(_CORE)]
    if outside:
        last = outside[-1]
        return f"{PurePath(last.filename).name}:{last.lineno} in {last.name}"
    code = getattr(getattr(type(policy), method, None), "__code__", None)
    if code is None:
        return method
    return f"{PurePath(code.co_filename).name}:{code.co_firstlineno}, the answer of {method}"


class PolicyMemory:
    """State of a policy between two calls.

    Attributes:
        state: Struct that the next call gets; None for a policy without a state.
        kept: The same as bytes; empty for such a policy.
    """

    def __init__(self, policy: Policy) -> None:
        self.state: Any = None
        self.kept = b""
        self._type = policy.state_type
        self._decoder: msgspec.msgpack.Decoder[msgspec.Struct] | None = None
        if self._type is not None:
            self._decoder = msgspec.msgpack.Decoder(self._type)
            self.keep(_encode(self._type()))

    def accept(self) -> None:
        """Keep the changes that the last call made to the state.

        Raises:
            PolicyError: If the state is too large or cannot be encoded; the changes are not kept.
        """
        if self._decoder is None:
            return
        try:
            data = _encode(self.state)
        except (TypeError, OverflowError, RecursionError) as error:
            raise PolicyError(f"its state cannot be kept: {error}") from error
        self.keep(data)

    def drop_changes(self) -> None:
        """Undo the changes that the last call made to the state."""
        if self._decoder is not None:
            self.state = self._decoder.decode(self.kept)

    def keep(self, data: bytes) -> None:
        """Replace the state.

        Raises:
            PolicyError: If it is too large or cannot be decoded.
        """
        assert self._decoder is not None
        if len(data) > STATE_BYTES_MAX:
            raise PolicyError(
                limit_message(
                    "its state is too large",
                    value=f"{len(data):,} bytes",
                    limit=f"{STATE_BYTES_MAX:,}",
                    remedy="remember less: sums instead of lists, and entries that are dropped again",
                )
            )
        try:
            state = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise PolicyError(f"its state cannot be kept: {error}") from error
        self.kept, self.state = data, state

    def take_over(self, data: bytes) -> None:
        """Take over recorded bytes; empty ones are a state that has not changed yet.

        Raises:
            PolicyError: If they are not a state of this policy.
        """
        if self._type is not None:
            self.keep(data or _encode(self._type()))
        elif data:
            raise PolicyError("it has no state, and one was recorded")


class PolicySeat(Restorable):
    """One place where the kernel calls a policy.

    Attributes:
        policy: The policy.
        method: Name of the method that is called.
        ask: Calls it.
        replaced: Reason why it is no longer called; empty while it is.
        overruled: Number of valid answers that the kernel did not follow, by reason.
        failed: Number of failed calls since this kernel was created.
    """

    replaced: Saved[str] = ""
    overruled: Saved[dict[str, int]]

    def __init__(
        self,
        policy: Policy,
        decision: Decision,
        faults: PolicyFaults,
        memory: PolicyMemory | None = None,
    ) -> None:
        assert decision.check is not None, f"{decision.name} is not decided at a seat"
        assert decision.default is not None, f"{decision.name} has no default"
        self.method = decision.method
        self._check, self._default = decision.check, decision.default
        self.overruled = {}
        self.failed = 0
        self._faults = faults
        self.install(policy, memory or PolicyMemory(policy))

    def install(self, policy: Policy, memory: PolicyMemory) -> None:
        """Call this policy from now on, with this state."""
        self.policy = policy
        self.ask: Ask = getattr(policy, self.method)
        self._memory = memory
        self.replaced = ""

    def decide(self, view: object, *facts: Any) -> Any:
        """Call the policy, and return its checked value; after a failure, return the default.

        `facts` are the further arguments of check and default.
        """
        if self.replaced:
            return self._default(*facts)
        try:
            return self._answer(view, facts)
        except BaseException as error:  # noqa: BLE001 - a policy may raise anything, SystemExit included
            self.report_failure(error, view)
            return self._default(*facts)

    @interruptible
    def _answer(self, view: object, facts: Sequence[Any]) -> Any:
        answer = self._check(self.ask(view), *facts)
        if self._memory.state is not None:
            self._memory.accept()
        return answer

    @property
    def state(self) -> Any:
        """State that the next call gets; None for a policy without a state."""
        return self._memory.state

    @property
    def kept(self) -> Saved[bytes]:
        """The state as bytes; empty for a policy without a state.

        Raises:
            RecordError: When it is set to bytes that are not a state of this policy.
        """
        return self._memory.kept

    @kept.setter
    def kept(self, data: Saved[bytes]) -> None:
        try:
            self._memory.take_over(data)
        except PolicyError as error:
            raise RecordError(f"{type(self.policy).__qualname__}: {error}") from error

    def report_failure(self, error: BaseException, view: object) -> None:
        """Report a failed call, and undo its changes to the state; a policy that did not return is replaced."""
        self.failed += 1
        self._faults.report(self.policy, self.method, error, view)
        if isinstance(error, PolicyStuckError):
            self.replace(str(error))
        try:
            self._memory.drop_changes()
        except BaseException as again:  # noqa: BLE001 - a state's __post_init__ may raise anything
            self._faults.report(self.policy, self.method, again, "its state")
            self.replace(f"its state cannot be read: {safe_text(again, str)}")

    def overrule(self, reason: str) -> None:
        """Count a valid answer that the kernel does not follow, or not in all."""
        self.overruled[reason] = self.overruled.get(reason, 0) + 1

    def lengthen_hold(self, until_ns: int, now_ns: int) -> int:
        """Return the end of a hold, which lasts `HOLD_MIN_NS` at least."""
        if until_ns >= now_ns + HOLD_MIN_NS:
            return until_ns
        self.overrule(SHORT_HOLD)
        return now_ns + HOLD_MIN_NS

    def replace(self, reason: str) -> None:
        """Stop calling the policy; the default decides from now on."""
        self.replaced = reason


class PolicySeats(Restorable):
    """The seats of a scheduler by name, such as `generate-0.admission`, and their failures.

    The policy `policies.several` has one state for all its seats, each other policy a state for each seat.
    """

    faults: Saved[PolicyFaults]
    _seats: Saved[dict[str, PolicySeat]]

    def __init__(self, policies: SeatPolicies) -> None:
        self.faults = PolicyFaults()
        self.policies = policies
        self._seats = {}
        several = policies.several
        self._memory = None if several is None else PolicyMemory(several)
        self._watch: Callable[[str, Ask], Ask] = lambda _, ask: ask

    def add_seat(self, name: str) -> PolicySeat:
        """Create a seat for the decision that its name ends with."""
        assert name not in self._seats, f"there are two seats with the name {name}"
        policy = self.policies.by_table[table_of(name)]
        memory = self._memory if policy is self.policies.several else None
        decision = DECISIONS[name.rpartition(".")[2]]
        seat = self._seats[name] = PolicySeat(policy, decision, self.faults, memory)
        return seat

    def watch(self, watch: Callable[[str, Ask], Ask]) -> None:
        """Replace the call of each policy, and of later ones, with `watch(name of its seat, call)`."""
        self._watch = watch
        for name, seat in self._seats.items():
            if not seat.replaced:
                seat.ask = watch(name, seat.ask)

    def install(self, tables: Collection[str], policy: Policy, *, one_state: bool) -> None:
        """Put a policy at the seats of configuration tables, with a fresh state for each seat, or one for all."""
        self.faults.forget(policy)
        shared = PolicyMemory(policy) if one_state else None
        for name, seat in self._seats.items():
            if table_of(name) in tables:
                seat.install(policy, shared or PolicyMemory(policy))
                seat.ask = self._watch(name, seat.ask)

    def replace(self, name: str, reason: str) -> bool:
        """Let the default decide in a seat; return False if it did already, or there is no such seat."""
        seat = self._seats.get(name)
        if seat is None or seat.replaced:
            return False
        seat.replace(reason)
        return True

    def replaced(self) -> dict[str, str]:
        """Return the reasons of replaced policies, by seat."""
        return {name: seat.replaced for name, seat in self._seats.items() if seat.replaced}

    def failed(self) -> dict[str, int]:
        """Return the number of failed calls since this kernel was created, by seat."""
        return {name: seat.failed for name, seat in self._seats.items() if seat.failed}

    def overruled(self) -> dict[str, dict[str, int]]:
        """Return by seat how often the kernel did not follow a valid answer, and why."""
        return {name: seat.overruled for name, seat in self._seats.items() if seat.overruled}

    def states(self) -> dict[str, bytes]:
        """Return the encoded states of policies, by the names of their seats."""
        return {name: seat.kept for name, seat in self._seats.items() if seat.kept}


def table_of(seat: str) -> str:
    """Return the configuration table of a seat: `generate.step` for `generate-0.step`."""
    group, _, decision = seat.rpartition(".")
    return f"{stage_of(group)}.{decision}" if group else decision


def check_state_type(policy: type[Policy], kind: str) -> None:
    """Check the `state_type` of a policy class for a decision.

    Raises:
        PolicyError: If it cannot be kept; the message does not name the policy.
    """
    state_type: Any = policy.state_type
    if state_type is None:
        return
    if not DECISIONS[kind].remembers and decisions_of(policy) == [kind]:
        raise PolicyError(f"a policy of the kind {kind} has no state; leave state_type out")
    if not (isinstance(state_type, type) and issubclass(state_type, msgspec.Struct)):
        raise PolicyError(f"state_type is {state_type!r}, must be a msgspec.Struct")
    name = state_type.__qualname__
    if state_type.__struct_config__.frozen:
        raise PolicyError(f"the state {name} is frozen, and a policy changes it in place")
    for path, reason in _unfit(msgspec.inspect.type_info(state_type), name, ()):
        raise PolicyError(f"the state {path} {reason}")
    try:
        state = state_type()
    except TypeError as error:
        raise PolicyError(
            f"the state {name} must have a default for every field: {error}"
        ) from error
    try:
        same = msgspec.msgpack.decode(_encode(state), type=state_type) == state
    except (msgspec.MsgspecError, TypeError, OverflowError) as error:
        raise PolicyError(f"the state {name} has defaults that cannot be kept: {error}") from error
    if not same:
        raise PolicyError(f"the state {name} has defaults of other types than it declares")


def _unfit(kind: Any, path: str, above: tuple[type, ...]) -> Iterator[tuple[str, str]]:
    """Yield the paths in the type of a state that cannot be kept, with the reasons."""
    inspect = msgspec.inspect
    match kind:
        case inspect.StructType():
            for field in kind.fields if kind.cls not in above else ():
                yield from _unfit(field.type, f"{path}.{field.name}", (*above, kind.cls))
        case inspect.ListType() | inspect.VarTupleType():
            yield from _unfit(kind.item_type, path, above)
        case inspect.DictType():
            yield from _unfit(kind.key_type, path, above)
            yield from _unfit(kind.value_type, path, above)
        case inspect.TupleType(parts) | inspect.UnionType(parts):
            for one in parts:
                yield from _unfit(one, path, above)
        case inspect.Metadata():
            yield from _unfit(kind.type, path, above)
        case inspect.SetType() | inspect.FrozenSetType():
            yield path, "is a set, whose order differs between processes; use a list or a dict"
        case inspect.AnyType():
            yield path, "has no type of its own; state the type of its content"
        case _ if not isinstance(kind, _PLAIN):
            name = type(kind).__name__
            yield path, f"is no plain value ({name}); use numbers, text, lists and dicts"
