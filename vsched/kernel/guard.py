"""Policies propose; this is where a bad proposal is caught.

A policy that raises, or proposes something impossible, is counted and reported with its input, and the kernel's own
default decides in its place. Serving goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from operator import index as whole
from typing import Generic, TypeVar, cast

from vsched.policy import (
    Admission,
    AdmissionPolicy,
    AdmissionView,
    EncodingPolicy,
    EncodingView,
    EvictionOrder,
    EvictionPolicy,
    PreemptionPolicy,
    PreemptionView,
    RoutingPolicy,
    RoutingView,
)

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")
HOLD_MAX_NS = 60 * 1_000_000_000
"""Nothing may be held for longer after its arrival: a policy can delay, but not stop."""
NOTICES_MAX = 100
"""A policy that raises in every step must not flood the log: after so many notices it is only counted."""


class PolicyFaults:
    """Counts policy failures and keeps notices until the scheduler hands them out."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.notices: list[str] = []
        self._reported = 0

    def report(self, policy: object, error: Exception, shown: object) -> None:
        """Count a failure, and word a notice with the policy's input."""
        name = type(policy).__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        if self._reported < NOTICES_MAX:
            self._reported += 1
            self.notices.append(
                f"policy {name} failed ({type(error).__name__}: {error}); the default decided. Input: {shown!r:.500}"
            )


def ask_admission(policy: AdmissionPolicy, view: AdmissionView, faults: PolicyFaults) -> Admission:
    """Return the policy's admission, or all entries in queue order where it fails."""
    try:
        answer = policy.admit(view)
        indices = [whole(index) for index in answer.indices]
        if len(set(indices)) != len(indices):
            raise ValueError(f"indices repeat: {indices}")
        if any(not 0 <= index < len(view.waiting) for index in indices):
            raise ValueError(f"an index is outside 0 to {len(view.waiting) - 1}: {indices}")
        if not indices and answer.hold_until_ns is None and view.running == 0 and view.waiting:
            raise ValueError("nothing runs, nothing is admitted and no time to hold until is given")
        if answer.hold_until_ns is not None:
            _check_hold(indices, answer.hold_until_ns, view)
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        faults.report(policy, error, view)
        return Admission(range(min(len(view.waiting), max(view.entries_free, 1))))
    return Admission(indices, answer.hold_until_ns)


def _check_hold(indices: list[int], until_ns: int, view: AdmissionView) -> None:
    if indices:
        raise ValueError("entries join, and yet everything is held")
    if until_ns <= view.now_ns:
        raise ValueError(f"hold_until_ns {until_ns} is not after now {view.now_ns}")
    oldest_ns = min(entry.arrived_ns for entry in view.waiting)
    if until_ns > oldest_ns + HOLD_MAX_NS:
        raise ValueError(f"an entry is held for over {HOLD_MAX_NS // 1_000_000_000} s")


def ask_encoding(policy: EncodingPolicy, view: EncodingView, faults: PolicyFaults) -> list[int]:
    """Return indices of the items to encode now: those the chunk needs, and what the policy adds."""
    needed = [
        index
        for index, item in enumerate(view.items)
        if item.start < view.chunk_stop and item.stop > view.chunk_start
    ]
    try:
        chosen = [whole(index) for index in policy.select(view)]
        if any(not 0 <= index < len(view.items) for index in chosen):
            raise ValueError(f"an index is outside 0 to {len(view.items) - 1}: {chosen}")
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        faults.report(policy, error, view)
        return needed
    return sorted({*needed, *chosen})


def ask_preemption(policy: PreemptionPolicy, view: PreemptionView, faults: PolicyFaults) -> int:
    """Return the index of the victim, or the youngest where the policy fails."""
    try:
        index = whole(policy.victim(view))
        if not 0 <= index < len(view.running):
            raise ValueError(f"index {index} is outside 0 to {len(view.running) - 1}")
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        faults.report(policy, error, view)
        return len(view.running) - 1
    return index


def ask_routing(policy: RoutingPolicy, view: RoutingView, faults: PolicyFaults) -> int:
    """Return the index of a replica; where the policy fails, of the least loaded that is healthy."""
    try:
        index = whole(policy.choose(view))
        if not 0 <= index < len(view.replicas):
            raise ValueError(f"index {index} is outside 0 to {len(view.replicas) - 1}")
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        faults.report(policy, error, view)
        return min(view.replicas, key=lambda one: (not one.healthy, one.load_tokens)).index
    return index


class InsertionOrder(Generic[Key]):
    """The kernel's own eviction order: least recently released first."""

    def __init__(self) -> None:
        self._keys: dict[Key, None] = {}

    def add(self, key: Key, size: int) -> bool:
        """Take an entry as the most recent."""
        self._keys[key] = None
        return True

    def reuse(self, key: Key) -> None:
        """Forget a hit."""
        del self._keys[key]

    def drop(self, key: Key) -> None:
        """Forget a removed entry."""
        del self._keys[key]

    def victim(self) -> Key:
        """Return the least recent."""
        return next(iter(self._keys))

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)


class GuardedOrder(Generic[Key]):
    """An eviction order whose every answer is checked; the kernel's own order takes over where it fails.

    The set of evictable keys is kept here too, in order of release, so that nothing is lost with a broken order.
    """

    def __init__(self, policy: EvictionPolicy, faults: PolicyFaults) -> None:
        self._policy = policy
        self._faults = faults
        self._mirror: InsertionOrder[Key] = InsertionOrder()
        # One order serves one cache, so it only ever sees keys of this cache's type.
        self._order = cast("EvictionOrder[Key] | None", self._attempt(self._build))

    def _build(self) -> EvictionOrder[Hashable]:
        order: EvictionOrder[Hashable] | None = self._policy.build_order()
        if order is None:
            raise TypeError("build_order returned None")
        return order

    def add(self, key: Key, size: int) -> bool:
        """Take an entry; False where the policy keeps nothing."""
        if self._order is not None:
            order = self._order
            if self._attempt(lambda: order.add(key, size)) is False:
                return False
        return self._mirror.add(key, size)

    def reuse(self, key: Key) -> None:
        """Take an entry out because it is in use again."""
        self._mirror.reuse(key)
        if self._order is not None:
            order = self._order
            self._attempt(lambda: order.reuse(key))

    def drop(self, key: Key) -> None:
        """Take an entry out because it left the cache."""
        self._mirror.drop(key)
        if self._order is not None:
            order = self._order
            self._attempt(lambda: order.drop(key))

    def victim(self) -> Key:
        """Return the next entry to go; it is always one of those that were added."""
        if self._order is not None:
            order = self._order

            def propose() -> Key:
                key = order.victim()
                if key not in self._mirror:
                    raise KeyError(f"victim {key!r} is not evictable")
                return key

            proposed = self._attempt(propose)
            if proposed is not None:
                return proposed
        return self._mirror.victim()

    def _attempt(self, call: Callable[[], Result]) -> Result | None:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - a user's class may raise anything
            self._faults.report(self._policy, error, f"{len(self._mirror)} evictable entries")
            self._order = None
            return None

    def __len__(self) -> int:
        return len(self._mirror)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._mirror)
