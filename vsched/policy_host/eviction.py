"""Eviction orders of policies, guarded: after a failure, the order of release decides."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar, cast

import msgspec

from vsched.errors import RecordError, reraise_interrupt, safe_text
from vsched.policy import CachePolicy, EvictionOrder, RecordableOrder
from vsched.policy_host.seats import PolicyFaults
from vsched.policy_host.snapshot import Restorable, Saved
from vsched.policy_host.stuck_calls import interruptible

Key = TypeVar("Key", bound=Hashable)
AnyResult = TypeVar("AnyResult")


class OrderState(msgspec.Struct):
    """The state of a `GuardedOrder`, and of the policy's order, unless that has failed (`given_up`)."""

    released: list[bytes]
    given_up: bool
    policy: msgspec.Raw


class GuardedOrder(Restorable, Generic[Key]):
    """An eviction order with validated answers; after a failure, the least recently released key is evicted first.

    It has the evictable keys, too, in order of release, so that none is lost with a failed order.
    """

    def __init__(self, policy: CachePolicy, faults: PolicyFaults) -> None:
        self._faults = faults
        self._install(policy)

    @interruptible
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
        """Add a key; return False if the policy refuses it."""
        return not self.add_all((key,), size)

    @interruptible
    def add_all(self, keys: Sequence[Key], size: int = 1) -> list[Key]:
        """Add keys of this size each, in order; return the refused ones."""
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
        """Hand the entries to an order of another policy, as they were released; return the refused ones."""
        keys = list(self._released)
        self._install(policy)
        return [key for key in keys if not self.add(key, size_of(key))]

    @interruptible
    def reuse(self, key: Key) -> None:
        """Remove a key that is in use again."""
        del self._released[key]
        if self._order is not None:
            try:
                self._order.reuse(key)
            except BaseException as error:  # noqa: BLE001
                self._give_up(error)

    @interruptible
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
        data = msgspec.msgpack.decode(state.policy)
        self._call("restore", lambda order: order.restore(data))

    def _policy_state(self) -> msgspec.Raw:
        if self._order is None:
            return msgspec.Raw(msgspec.msgpack.encode(None))
        return self._call("state", lambda order: msgspec.Raw(msgspec.msgpack.encode(order.state())))

    @interruptible
    def _call(self, method: str, call: Callable[[RecordableOrder], AnyResult]) -> AnyResult:
        order: object = self._order
        name = type(order).__qualname__
        if not isinstance(order, RecordableOrder):
            raise RecordError(f"the eviction order {name} has no methods state() and restore()")
        try:
            return call(order)
        except BaseException as error:
            reraise_interrupt(error)
            raise RecordError(f"{name}.{method}() failed: {safe_text(error)}") from error
