"""Policies propose; this is where a bad proposal is caught.

A policy that raises, or proposes something impossible, is counted and reported with its input, and the kernel's own
default decides in its place. Serving goes on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from operator import index as whole
from typing import Generic, SupportsIndex, TypeVar, cast, get_args

import msgspec

from vsched.errors import RecordError
from vsched.kernel.policy_seats import PolicyFaults, PolicySeat
from vsched.kernel.snapshot import Restorable, Saved
from vsched.policy import (
    DRAFT_TOKENS_MAX,
    Admission,
    AdmissionPolicy,
    AdmissionView,
    Dispatch,
    DispatchPolicy,
    DispatchView,
    Draft,
    DraftingPolicy,
    DraftingView,
    EncodingPolicy,
    EncodingView,
    EvictionOrder,
    EvictionPolicy,
    FrontDoorAnswer,
    FrontDoorPolicy,
    FrontDoorView,
    Hold,
    InsertionPolicy,
    InsertionView,
    LetIn,
    Manner,
    Preemption,
    PreemptionPolicy,
    PreemptionView,
    ReclaimPolicy,
    ReclaimView,
    RecordableOrder,
    Redirect,
    RoutingPolicy,
    RoutingView,
    Shed,
    StepPolicy,
    StepShares,
    StepView,
)

Key = TypeVar("Key", bound=Hashable)
MANNERS: tuple[Manner, ...] = get_args(Manner)
HOLD_MAX_NS = 60 * 1_000_000_000
"""Nothing may be held for longer after its arrival: a policy can delay, but not stop."""

SHED_STATUS = (429, 503)
RETRY_AFTER_MAX_S = 24 * 3600
REASON_CHARACTERS_MAX = 500


class OrderState(msgspec.Struct):
    """The state of a `GuardedOrder`; `policy` is that of the policy's order, and `given_up` says that it has none."""

    released: list[bytes]
    given_up: bool
    policy: msgspec.Raw


def _index(answer: SupportsIndex, *, count: int) -> int:
    """Return an index into `count` entries."""
    index = whole(answer)
    if not 0 <= index < count:
        raise ValueError(f"index {index} is outside 0 to {count - 1}")
    return index


def _indices(answer: Iterable[SupportsIndex], *, count: int) -> list[int]:
    """Return indices into `count` entries."""
    indices = [whole(one) for one in answer]
    for index in indices:
        if not 0 <= index < count:
            raise ValueError(f"an index is outside 0 to {count - 1}: {indices}")
    return indices


def _distinct(answer: Iterable[SupportsIndex], *, count: int) -> Sequence[int]:
    """Return indices into `count` entries, each at most once."""
    if type(answer) is range and answer == range(count):
        return range(count)  # all in order, as most answers are
    indices = _indices(answer, count=count)
    if len(indices) > 1 and len(set(indices)) != len(indices):
        raise ValueError(f"indices repeat: {indices}")
    return indices


def ask_admission(seat: PolicySeat[AdmissionPolicy], view: AdmissionView) -> Admission:
    """Return the policy's admission, or all entries in queue order where it fails."""
    try:
        answer = seat.ask(view)
        indices = _distinct(answer.indices, count=len(view.waiting))
        if not indices and answer.hold_until_ns is None and view.running == 0 and view.waiting:
            raise ValueError("nothing runs, nothing is admitted and no time to hold until is given")
        until_ns = None if answer.hold_until_ns is None else whole(answer.hold_until_ns)
        if until_ns is not None:
            _check_hold(indices, until_ns, view)
        seat.accept()
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        seat.fail(error, view)
        return Admission(range(min(len(view.waiting), max(view.entries_free, 1))))
    return Admission(indices, until_ns)


def _check_hold(indices: Sequence[int], until_ns: int, view: AdmissionView) -> None:
    if indices:
        raise ValueError("entries join, and yet everything is held")
    if until_ns <= view.now_ns:
        raise ValueError(f"hold_until_ns {until_ns} is not after now {view.now_ns}")
    oldest_ns = min(entry.arrived_ns for entry in view.waiting)
    if until_ns > oldest_ns + HOLD_MAX_NS:
        raise ValueError(f"an entry is held for over {HOLD_MAX_NS // 1_000_000_000} s")


def ask_encoding(seat: PolicySeat[EncodingPolicy], view: EncodingView) -> list[int]:
    """Return indices of the items to encode now: those the chunk needs, and what the policy adds."""
    needed = [
        index
        for index, item in enumerate(view.items)
        if item.start < view.chunk_stop and item.stop > view.chunk_start
    ]
    try:
        chosen = _indices(seat.ask(view), count=len(view.items))
        seat.accept()
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        seat.fail(error, view)
        return needed
    return sorted({*needed, *chosen})


def ask_preemption(seat: PolicySeat[PreemptionPolicy], view: PreemptionView) -> Preemption:
    """Return the victim and the manner; where the policy fails, the youngest is recomputed."""
    try:
        answer = seat.ask(view)
        found = answer if isinstance(answer, Preemption) else Preemption(whole(answer))
        index = _index(found.victim, count=len(view.running))
        if found.manner not in MANNERS:
            raise ValueError(f"manner {found.manner!r} is none of {', '.join(MANNERS)}")
        manner = MANNERS[MANNERS.index(found.manner)]
        seat.accept()
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        seat.fail(error, view)
        return Preemption(len(view.running) - 1)
    return Preemption(index, manner)


def ask_drafting(seat: PolicySeat[DraftingPolicy], view: DraftingView) -> Draft:
    """Return what may be drafted for a request, or nothing any more where the policy fails."""
    try:
        answer = seat.ask(view)
        found = Draft(
            whole(answer.tokens), whole(answer.steps), whole(answer.ngram), bool(answer.model)
        )
        if not 0 <= found.tokens <= DRAFT_TOKENS_MAX:
            raise ValueError(f"{found.tokens} tokens are outside 0 to {DRAFT_TOKENS_MAX}")
        if found.steps < 0 or found.ngram < 0:
            raise ValueError(f"{found} has a number below 0")
        seat.accept()
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        seat.fail(error, view)
        return Draft()
    return found


def ask_step(seat: PolicySeat[StepPolicy], view: StepView) -> StepShares:
    """Return who advances in a step and by how much, or all in order where the policy fails."""
    try:
        answer = seat.ask(view)
        order = _distinct(answer.order, count=len(view.prefilling))
        tokens = None if answer.tokens is None else [whole(count) for count in answer.tokens]
        if tokens is not None and (len(tokens) != len(order) or any(one < 0 for one in tokens)):
            raise ValueError(f"{tokens} are not counts for each of {order}")
        time_ns = None if answer.time_ns is None else whole(answer.time_ns)
        if time_ns is not None and time_ns < 0:
            raise ValueError(f"time_ns is {time_ns}, below 0")
        seat.accept()
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        seat.fail(error, view)
        return StepShares(range(len(view.prefilling)))
    return StepShares(order, tokens, time_ns)


def ask_routing(seat: PolicySeat[RoutingPolicy], view: RoutingView) -> int:
    """Return the index of a replica; where the policy fails, of the least loaded that is healthy."""
    try:
        index = _index(seat.ask(view), count=len(view.replicas))
        seat.accept()
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        seat.fail(error, view)
        return min(view.replicas, key=lambda one: (not one.healthy, one.load_tokens)).index
    return index


def ask_front_door(seat: PolicySeat[FrontDoorPolicy], view: FrontDoorView) -> FrontDoorAnswer:
    """Return whether a request comes in; where the policy fails, it does."""
    try:
        answer = _door_answer(seat.ask(view), view)
        seat.accept()
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        seat.fail(error, view)
        return LetIn()
    return answer


def _door_answer(answer: object, view: FrontDoorView) -> FrontDoorAnswer:
    """Validate an answer and convert it to the built-in types, which a record can hold."""
    match answer:
        case LetIn():
            return LetIn()
        case Hold(until_ns):
            _check_door_hold(whole(until_ns), view)
            return Hold(whole(until_ns))
        case Shed(reason, retry_after_s, status):
            if status not in SHED_STATUS:
                raise ValueError(f"status {status} is none of {SHED_STATUS}")
            if not 1 <= whole(retry_after_s) <= RETRY_AFTER_MAX_S:
                raise ValueError(f"retry_after_s {retry_after_s} is outside 1 to 86400")
            if not reason or len(reason) > REASON_CHARACTERS_MAX:
                raise ValueError(f"a reason of {len(reason)} characters, not 1 to 500")
            return Shed(_text(reason), whole(retry_after_s), whole(status))
        case Redirect(base_url):
            if not base_url.startswith(("http://", "https://")) or not base_url.isprintable():
                raise ValueError(f"{base_url!r} is no base URL")
            return Redirect(_text(base_url))
        case _:
            raise TypeError(f"{answer!r} is no LetIn, Hold, Shed or Redirect")


def _text(answer: str) -> str:
    """Return a text as a plain str, which a record can hold; raise if UTF-8 cannot encode it."""
    return answer.encode().decode()


def _check_door_hold(until_ns: int, view: FrontDoorView) -> None:
    if until_ns <= view.now_ns:
        raise ValueError(f"until_ns {until_ns} is not after now {view.now_ns}")
    if until_ns > view.request.arrived_ns + HOLD_MAX_NS:
        raise ValueError(f"a request is held for over {HOLD_MAX_NS // 1_000_000_000} s")


def ask_dispatch(
    seat: PolicySeat[DispatchPolicy], view: DispatchView, *, encoding: int
) -> Dispatch:
    """Return who has the next batch and of which images; where the policy fails, who holds up the fewest, and all.

    `encoding` images are being encoded, without which something must come of it.
    """
    try:
        answer = seat.ask(view)
        group, order = answer.group, answer.order
        if group is not None:
            group = _index(group, count=len(view.groups))
            if not view.groups[group].free:
                raise ValueError(f"group {group} is not free")
        if order is not None:
            order = _distinct(order, count=len(view.waiting))
        if not encoding and (group is None or (order is not None and not order)):
            raise ValueError("nothing is being encoded, and nothing is to be")
        seat.accept()
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        seat.fail(error, view)
        return Dispatch(fewest_held_up(view))
    return Dispatch(group, order)


def fewest_held_up(view: DispatchView) -> int:
    """Return the free group that keeps the fewest requests from their next tokens."""
    free = [index for index, group in enumerate(view.groups) if group.free]
    return min(free, key=lambda index: view.groups[index].held_up)


def ask_reclaim(seat: PolicySeat[ReclaimPolicy], view: ReclaimView) -> list[int]:
    """Return which ready embeddings give way, in this order; where the policy fails, all, the youngest first."""
    try:
        chosen = list(_distinct(seat.ask(view), count=len(view.ready)))
        seat.accept()
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        seat.fail(error, view)
        return list(range(len(view.ready) - 1, -1, -1))
    return chosen


def ask_insertion(seat: PolicySeat[InsertionPolicy], view: InsertionView) -> int:
    """Return how many of the first blocks of a request are kept, or all where the policy fails."""
    try:
        kept = _index(seat.ask(view), count=len(view.hashes) + 1)
        seat.accept()
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        seat.fail(error, view)
        return len(view.hashes)
    return max(kept, view.found)


class GuardedOrder(Restorable, Generic[Key]):
    """An eviction order whose every answer is checked; where it fails, least recently released goes first.

    The set of evictable keys is kept here too, in order of release, so that nothing is lost with a broken order.
    """

    def __init__(self, policy: EvictionPolicy, faults: PolicyFaults) -> None:
        self._policy = policy
        self._faults = faults
        # Maps each key to the object that was added: the policy may return a victim of another type that equals it.
        self._released: dict[Key, Key] = {}
        self._order: EvictionOrder[Key] | None = None
        try:
            # One order serves one cache, so it only ever sees keys of this cache's type.
            self._order = cast("EvictionOrder[Key] | None", policy.build_order())
            if self._order is None:
                raise TypeError("build_order returned None")
        except Exception as error:  # noqa: BLE001 - a user's class may raise anything
            self._give_up(error)

    def add(self, key: Key, size: int) -> bool:
        """Take an entry; False where the policy keeps nothing."""
        return not self.add_all((key,), size)

    def add_all(self, keys: Sequence[Key], size: int = 1) -> list[Key]:
        """Take entries of this size each, one after the other; return those that the policy does not keep."""
        refused: list[Key] = []
        order, rest = self._order, iter(keys)
        if order is not None:
            released = self._released
            try:
                add = order.add
                for key in rest:
                    released[key] = key
                    if add(key, size) is False:
                        del released[key]
                        refused.append(key)
            except Exception as error:  # noqa: BLE001
                self._give_up(error)
        self._released.update((key, key) for key in rest)
        return refused

    def reuse(self, key: Key) -> None:
        """Take an entry out because it is in use again."""
        del self._released[key]
        order = self._order
        if order is not None:
            try:
                order.reuse(key)
            except Exception as error:  # noqa: BLE001
                self._give_up(error)

    def drop(self, key: Key) -> None:
        """Take an entry out because it left the cache."""
        del self._released[key]
        order = self._order
        if order is not None:
            try:
                order.drop(key)
            except Exception as error:  # noqa: BLE001
                self._give_up(error)

    def take_victims(self, count: int) -> list[Key]:
        """Take the next entries to go out of the order; they are always among those that were added."""
        victims: list[Key] = []
        order = self._order
        if order is not None:
            released = self._released
            try:
                victim, drop = order.victim, order.drop
                for _ in range(count):
                    named = victim()
                    if named not in released:
                        raise KeyError(f"victim {named!r} is not evictable")
                    key = released.pop(named)
                    victims.append(key)
                    drop(key)
            except Exception as error:  # noqa: BLE001
                self._give_up(error)
        while len(victims) < count:
            key = next(iter(self._released))  # an OrderedDict by now
            del self._released[key]
            victims.append(key)
        return victims

    def _give_up(self, error: Exception) -> None:
        self._faults.report(self._policy, error, f"{len(self._released)} evictable entries")
        self._order = None
        # From now on its first key is asked for again and again: a plain dict would pass over all that were removed.
        self._released = OrderedDict(self._released)

    def __len__(self) -> int:
        return len(self._released)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._released)

    @property
    def state(self: GuardedOrder[bytes]) -> Saved[OrderState]:
        """The state, of an order of `bytes`.

        Raises:
            RecordError: When the policy's order cannot tell its own, or it is not of plain values.
        """
        return OrderState(list(self._released), self._order is None, self._policy_state())

    @state.setter
    def state(self: GuardedOrder[bytes], state: OrderState) -> None:
        self._released = (OrderedDict if state.given_up else dict)(
            zip(state.released, state.released, strict=True)
        )
        if state.given_up:
            self._order = None
            return
        order = _recordable(self._order)
        try:
            order.restore(msgspec.msgpack.decode(state.policy))
        except Exception as error:
            raise RecordError(f"{type(order).__qualname__}.restore() failed: {error!r}") from error

    def _policy_state(self) -> msgspec.Raw:
        if self._order is None:
            return msgspec.Raw(msgspec.msgpack.encode(None))
        order = _recordable(self._order)
        try:
            return msgspec.Raw(msgspec.msgpack.encode(order.state()))
        except Exception as error:
            name = type(order).__qualname__
            raise RecordError(f"{name}.state() cannot be recorded: {error!r}") from error


def _recordable(order: object) -> RecordableOrder:
    if not isinstance(order, RecordableOrder):
        name = type(order).__qualname__
        raise RecordError(f"the eviction order {name} has no methods state() and restore()")
    return order
