"""Calls of policies: their answers are validated, and replaced by a default after a failure.

An exception or an invalid answer is counted and reported with the input of the call, and serving continues.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import index as whole
from typing import Any, Generic, SupportsIndex, TypeVar, cast, get_args

import msgspec

from vsched.errors import RecordError, reraise_interrupt, safe_text
from vsched.kernel.policy_seats import PolicyFaults, PolicySeat
from vsched.kernel.snapshot import Restorable, Saved
from vsched.policy import (
    DRAFT_TOKENS_MAX,
    Admission,
    AdmissionView,
    Admit,
    ArrivalDecision,
    ArrivalView,
    CachePolicy,
    Dispatch,
    DispatchView,
    Draft,
    DraftingPolicy,
    DraftingView,
    EncodingView,
    EvictionOrder,
    Hold,
    ImagePolicy,
    InsertionView,
    Preemption,
    PreemptionMode,
    PreemptionView,
    ReclaimView,
    RecordableOrder,
    Redirect,
    RequestPolicy,
    RoutingPolicy,
    RoutingView,
    Shed,
    StepShares,
    StepView,
)

Key = TypeVar("Key", bound=Hashable)
Answer = TypeVar("Answer")
MODES: tuple[PreemptionMode, ...] = get_args(PreemptionMode)
HOLD_MAX_NS = 60 * 1_000_000_000
"""Default of `SchedulerLimits.passed_over_ns`: a policy can delay a request, but not stop it."""

SHED_STATUS = (429, 503)
RETRY_AFTER_MAX_S = 24 * 3600
TEXT_CHARACTERS_MAX = 500
COUNT_MAX = 2**31 - 1
"""Maximum count in an answer; messages to ranks and records have 32-bit counts."""
TIME_MAX_NS = 2**63 - 1


class OrderState(msgspec.Struct):
    """The state of a `GuardedOrder`, and of the policy's order, unless that has failed (`given_up`)."""

    released: list[bytes]
    given_up: bool
    policy: msgspec.Raw


def _ask(seat: PolicySeat[Any], view: object, read: Callable[[Any], Answer]) -> Answer | None:
    """Call the policy of a seat and read its answer; return None after a failure, so that the default decides.

    `read` validates the answer and copies it to built-in types. It must not use the view, which a policy could have
    changed by force.
    """
    try:
        answer = read(seat.ask(view))
        seat.accept()
    except BaseException as error:  # noqa: BLE001 - a policy may raise anything, SystemExit included
        seat.fail(error, view)
        return None
    return answer


def _number(answer: SupportsIndex, *, most: int, least: int = 0) -> int:
    """Return an integer within bounds."""
    number = whole(answer)
    if not least <= number <= most:
        raise ValueError(f"{number} is outside {least} to {most}")
    return number


def _index(answer: SupportsIndex, *, count: int) -> int:
    """Return an index into `count` entries."""
    index = whole(answer)
    if not 0 <= index < count:
        raise ValueError(f"index {index} is outside 0 to {count - 1}")
    return index


def _indices(answer: Iterable[SupportsIndex], *, count: int) -> list[int]:
    """Return indices into `count` entries, at most as many: an iterator may be endless."""
    if type(answer) is not list:
        answer = islice(answer, count + 1)
    indices = [whole(one) for one in answer]
    if len(indices) > count:
        raise ValueError(f"there are more indices than the {count} entries")
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


def ask_admission(
    seat: PolicySeat[RequestPolicy], view: AdmissionView, *, hold_max_ns: int = HOLD_MAX_NS
) -> Admission:
    """Return the entries to admit; by default all, in queue order."""
    waiting, entries_free = view.waiting, view.entries_free
    idle, now_ns = view.running == 0, view.now_ns

    def read(answer: Admission) -> Admission:
        indices = _distinct(answer.indices, count=len(waiting))
        hold_until_ns = answer.hold_until_ns
        if hold_until_ns is None:
            if not indices and idle and waiting:
                raise ValueError(
                    "nothing runs, nothing is admitted and no time to hold until is given"
                )
            return Admission(indices)
        if indices:
            raise ValueError("entries join, and yet everything is held")
        arrived_ns = min(entry.arrived_ns for entry in waiting)
        return Admission(indices, _hold(hold_until_ns, now_ns, arrived_ns, hold_max_ns))

    found = _ask(seat, view, read)
    if found is None:
        return Admission(range(min(len(waiting), max(entries_free, 1))))
    if len(found.indices) > entries_free:
        seat.overrule("more entries than can join")
    return found


PASSED_OVER = "one that was passed over for too long goes first"


def put_first(indices: Sequence[int], overdue: int) -> Sequence[int]:
    """Return indices with an overdue one first, unless all before it are ahead in the queue."""
    for index in indices:
        if index == overdue:
            break
        if index > overdue:
            return [overdue, *(other for other in indices if other != overdue)]
    return indices


def _hold(answer: SupportsIndex, now_ns: int, arrived_ns: int, most_ns: int) -> int:
    """Return the end of a hold, given the time of arrival."""
    until_ns = whole(answer)
    if until_ns <= now_ns:
        raise ValueError(f"the end of the hold, {until_ns}, is not after now, {now_ns}")
    if until_ns > arrived_ns + most_ns:
        raise ValueError(f"held for over {most_ns / 1e9:g} s (policies.passed_over_max_s)")
    return until_ns


def ask_encoding(seat: PolicySeat[ImagePolicy], view: EncodingView) -> list[int]:
    """Return indices of the items to encode now: those that the chunk needs, and those that the policy adds."""
    count, needed = len(view.items), list(view.needed)
    missing = {index for index in needed if not view.items[index].ready}
    chosen = _ask(seat, view, lambda answer: _indices(answer, count=count))
    if chosen is None:
        return needed
    if not missing.issubset(chosen):
        seat.overrule("items that the chunk needs were left out")
    return sorted({*needed, *chosen})


def ask_preemption(seat: PolicySeat[RequestPolicy], view: PreemptionView) -> Preemption:
    """Return the victim and the mode; by default the youngest is recomputed."""
    count = len(view.running)

    def read(answer: int | Preemption) -> Preemption:
        found = answer if isinstance(answer, Preemption) else Preemption(whole(answer))
        index = _index(found.victim, count=count)
        if found.mode not in MODES:
            raise ValueError(f"mode {found.mode!r} is none of {', '.join(MODES)}")
        return Preemption(index, MODES[MODES.index(found.mode)])

    return _ask(seat, view, read) or Preemption(count - 1)


def ask_drafting(seat: PolicySeat[DraftingPolicy], view: DraftingView) -> Draft:
    """Return the draft grant of a request; by default none."""

    def read(answer: Draft) -> Draft:
        return Draft(
            _number(answer.tokens, most=DRAFT_TOKENS_MAX),
            _number(answer.steps, most=COUNT_MAX),
            _number(answer.ngram, most=COUNT_MAX),
            bool(answer.model),
        )

    return _ask(seat, view, read) or Draft()


def ask_step(seat: PolicySeat[RequestPolicy], view: StepView) -> StepShares:
    """Return the requests to prefill in a step, and their shares; by default all in order."""
    count = len(view.prefilling)

    def read(answer: StepShares) -> StepShares:
        order = _distinct(answer.order, count=count)
        tokens, time_ns = answer.tokens, answer.time_ns
        if tokens is not None:
            tokens = [_number(one, most=COUNT_MAX) for one in islice(tokens, count + 1)]
            if len(tokens) != len(order):
                raise ValueError(f"{tokens} are not counts for each of {order}")
        if time_ns is not None:
            time_ns = _number(time_ns, most=TIME_MAX_NS)
        return StepShares(order, tokens, time_ns)

    return _ask(seat, view, read) or StepShares(range(count))


def ask_routing(
    seat: PolicySeat[RoutingPolicy], view: RoutingView, default: Callable[[], int]
) -> int:
    """Return the index of a replica."""
    count = len(view.replicas)
    found = _ask(seat, view, lambda answer: _index(answer, count=count))
    return default() if found is None else found


def ask_front_door(
    seat: PolicySeat[RequestPolicy], view: ArrivalView, *, hold_max_ns: int = HOLD_MAX_NS
) -> ArrivalDecision:
    """Return the answer for an arrived request; by default it is admitted."""
    now_ns, arrived_ns = view.now_ns, view.request.arrived_ns

    def read(answer: object) -> ArrivalDecision:
        match answer:
            case Admit():
                return Admit()
            case Hold(until_ns):
                return Hold(_hold(until_ns, now_ns, arrived_ns, hold_max_ns))
            case Shed(reason, retry_after_s, status):
                if status not in SHED_STATUS:
                    raise ValueError(f"status {status} is none of {SHED_STATUS}")
                seconds = _number(retry_after_s, least=1, most=RETRY_AFTER_MAX_S)
                return Shed(_text(reason), seconds, whole(status))
            case Redirect(base_url):
                url = _text(base_url)
                if not url.startswith(("http://", "https://")) or not url.isprintable():
                    raise ValueError(f"{url!r} is no base URL")
                return Redirect(url)
        raise TypeError(f"{answer!r} is no Admit, Hold, Shed or Redirect")

    return _ask(seat, view, read) or Admit()


def _text(answer: str) -> str:
    """Return a text as a plain str for records; raise if UTF-8 cannot encode it."""
    text = str.encode(answer).decode()
    if not 1 <= len(text) <= TEXT_CHARACTERS_MAX:
        raise ValueError(f"a text of {len(text)} characters, not 1 to {TEXT_CHARACTERS_MAX}")
    return text


def ask_dispatch(
    seat: PolicySeat[ImagePolicy],
    view: DispatchView,
    *,
    free: Mapping[int, int],
    encoding: int,
) -> Dispatch:
    """Return the group of the next batch, and its images; by default `fewest(free)` and all images.

    `free` are the groups without a batch, each with the requests that get no token while it works. While no image is
    being encoded (`encoding` is 0), the answer must start a batch.
    """
    count = len(view.waiting)

    def read(answer: Dispatch) -> Dispatch:
        group, order = answer.group, answer.order
        if group is not None:
            group = whole(group)
            if group not in free:
                raise ValueError(f"group {group} is not free")
        if order is not None:
            order = _distinct(order, count=count)
        if not encoding and (group is None or (order is not None and not order)):
            raise ValueError("nothing is being encoded, and nothing is to be")
        return Dispatch(group, order)

    return _ask(seat, view, read) or Dispatch(fewest(free))


def fewest(counts: Mapping[int, int]) -> int:
    """Return the first key with the lowest count."""
    return min(counts, key=counts.__getitem__)


def ask_reclaim(seat: PolicySeat[ImagePolicy], view: ReclaimView) -> list[int]:
    """Return the ready embeddings to preempt, in order; by default all, youngest first."""
    count = len(view.ready)
    found = _ask(seat, view, lambda answer: list(_distinct(answer, count=count)))
    return list(range(count - 1, -1, -1)) if found is None else found


def ask_insertion(seat: PolicySeat[CachePolicy], view: InsertionView) -> int:
    """Return the number of leading blocks to keep in the prefix cache; by default all."""
    count, found = len(view.hashes), view.found
    kept = _ask(seat, view, lambda answer: _index(answer, count=count + 1))
    if kept is None:
        return count
    if kept < found:
        seat.overrule("blocks that were found in the cache stay")
    return max(kept, found)


class GuardedOrder(Restorable, Generic[Key]):
    """An eviction order with validated answers; after a failure, the least recently released key is evicted first.

    It has the evictable keys, too, in order of release, so that none is lost with a failed order.
    """

    def __init__(self, policy: CachePolicy, faults: PolicyFaults) -> None:
        self._faults = faults
        self._install(policy)

    def _install(self, policy: CachePolicy) -> None:
        self._policy = policy
        # Maps each key to the object that was added: the policy may return a victim of another type that equals it.
        self._released: dict[Key, Key] = {}
        self._order: EvictionOrder[Key] | None = None
        try:
            # One order serves one cache, so it only ever sees keys of this cache's type.
            self._order = cast("EvictionOrder[Key] | None", policy.build_order())
            if self._order is None:
                raise TypeError("build_order returned None")
        except BaseException as error:  # noqa: BLE001 - a policy may raise anything
            self._give_up(error)

    def add(self, key: Key, size: int) -> bool:
        """Add a key; return False if the policy does not keep it."""
        return not self.add_all((key,), size)

    def add_all(self, keys: Sequence[Key], size: int = 1) -> list[Key]:
        """Add keys of this size each, in order; return those that the policy does not keep."""
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
            except BaseException as error:  # noqa: BLE001
                self._give_up(error)
        self._released.update((key, key) for key in rest)
        return refused

    def replace(self, policy: CachePolicy, size_of: Callable[[Key], int]) -> list[Key]:
        """Hand the entries to an order of another policy, as they were released; return those that it does not keep."""
        keys = list(self._released)
        self._install(policy)
        return [key for key in keys if not self.add(key, size_of(key))]

    def reuse(self, key: Key) -> None:
        """Remove a key that is in use again."""
        del self._released[key]
        order = self._order
        if order is not None:
            try:
                order.reuse(key)
            except BaseException as error:  # noqa: BLE001
                self._give_up(error)

    def drop(self, key: Key) -> None:
        """Remove a key that left the cache."""
        del self._released[key]
        order = self._order
        if order is not None:
            try:
                order.drop(key)
            except BaseException as error:  # noqa: BLE001
                self._give_up(error)

    def take_victims(self, count: int) -> list[Key]:
        """Remove and return the next keys to evict, always among those in the order."""
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
            except BaseException as error:  # noqa: BLE001
                self._give_up(error)
        while len(victims) < count:
            key = next(iter(self._released))  # an OrderedDict by now
            del self._released[key]
            victims.append(key)
        return victims

    def _give_up(self, error: BaseException) -> None:
        self._faults.report(
            self._policy, "build_order", error, f"{len(self._released)} evictable entries"
        )
        self._order = None
        # Its first key is removed again and again: a plain dict would iterate over all removed ones.
        self._released = OrderedDict(self._released)

    def __len__(self) -> int:
        return len(self._released)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._released)

    @property
    def state(self: GuardedOrder[bytes]) -> Saved[OrderState]:
        """The state.

        Raises:
            RecordError: If the policy's order has no state of plain values.
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
        except BaseException as error:
            reraise_interrupt(error)
            name = type(order).__qualname__
            raise RecordError(f"{name}.restore() failed: {safe_text(error)}") from error

    def _policy_state(self) -> msgspec.Raw:
        if self._order is None:
            return msgspec.Raw(msgspec.msgpack.encode(None))
        try:
            return msgspec.Raw(msgspec.msgpack.encode(_recordable(self._order).state()))
        except RecordError:
            raise
        except BaseException as error:
            reraise_interrupt(error)
            name = type(self._order).__qualname__
            raise RecordError(f"{name}.state() cannot be recorded: {safe_text(error)}") from error


def _recordable(order: object) -> RecordableOrder:
    if not isinstance(order, RecordableOrder):
        name = type(order).__qualname__
        raise RecordError(f"the eviction order {name} has no methods state() and restore()")
    return order
